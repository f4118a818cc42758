"""From our weights to a directory that plain ``transformers`` loads, and the proof that it does."""

import math
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from diffmegatron.config.schema import ModelConfig, Recipe
from diffmegatron.data.tokenizers import Tokenizer, check_vocabulary
from diffmegatron.errors import UserError
from diffmegatron.hf.configuration import to_hf_config
from diffmegatron.hf.layout import Weights, table, to_hf
from diffmegatron.hf.shards import ShardWriter
from diffmegatron.hf.tokenizer import write_tokenizer

MAX_SHARD_BYTES = 4 * 2**30
MAX_VERIFY_TOKENS = 256


class LogitDifference(NamedTuple):
    """Largest difference of two sets of logits; infinite where either is not finite."""

    absolute: float
    relative: float
    """``absolute`` over the largest expected logit."""


def write_export(
    weights: Weights,
    recipe: Recipe,
    tokenizer: Tokenizer,
    out: Path,
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    verify: Callable[[Path], object] | None = None,
) -> None:
    """Write the model as DiffLlama, its softmax twin as Llama, with the tokenizer.

    The files go into a directory beside ``out`` that takes its name when all is done and checked;
    when anything fails, nothing stays behind.

    Args:
        weights: whole weights under Megatron's names (see :mod:`diffmegatron.hf.layout`), in any
            order; a generator is read one weight at a time.
        recipe: the run they come from.
        tokenizer: the run's tokenizer.
        out: directory to create; one that exists must be empty.
        dtype: of the file; lambda vectors stay fp32 in it. (``from_pretrained`` rounds them too
            when it loads in bf16, which no configuration of DiffLlama prevents.)
        max_shard_bytes: largest safetensors file, and the memory the writer needs.
        verify: called with the complete directory before it takes the name ``out``; what it
            raises ends the export.

    Raises:
        UserError: Hugging Face cannot compute this model, ``out`` is in use or cannot be written,
            weights and recipe do not agree, or the tokenizer does not convert exactly.
    """
    config = to_hf_config(recipe, tokenizer.end_of_document, dtype)
    check_vocabulary(tokenizer.name, tokenizer.vocab_size, recipe.model.vocab_size)
    with _appearing_whole(out) as directory:
        config.save_pretrained(directory)
        _generation_config(tokenizer.end_of_document).save_pretrained(directory)
        write_tokenizer(tokenizer, recipe.training.seq_length, directory)
        _write_weights(weights, recipe.model, directory, dtype, max_shard_bytes)
        if verify is not None:
            verify(directory)


def _generation_config(end_of_document: int) -> GenerationConfig:
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end_of_document)
    return GenerationConfig(**ids)


def _write_weights(
    weights: Weights, model: ModelConfig, directory: Path, dtype: torch.dtype, max_bytes: int
) -> None:
    keep_fp32 = {name for rule in table(model) if rule.keep_fp32 for name in rule.theirs}
    writer = ShardWriter(directory, max_bytes)
    for name, tensor in to_hf(weights, model):
        writer.add(name, tensor, torch.float32 if name in keep_fp32 else dtype)
    writer.close()


@contextmanager
def _appearing_whole(out: Path) -> Iterator[Path]:
    """A directory beside ``out`` that is renamed to it on success and removed otherwise."""
    out = out.resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists already; give a directory that is new or empty")
    partial = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot create a directory beside {out}: {error.strerror}") from error
    try:
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@torch.no_grad()
def verify_export(directory: Path, tokens: Tensor, expected: Tensor) -> LogitDifference:
    """Load an export as any user would, in fp32 on the CPU, and compare its logits.

    Args:
        directory: what :func:`write_export` wrote.
        tokens: ids [b, s], at most ``MAX_VERIFY_TOKENS`` of them, for this needs memory and time.
        expected: logits of the training model, [b, s, vocab_size].

    Raises:
        UserError: the files lack a weight of the model or hold one it does not have.
        ValueError: too many tokens, or shapes that do not fit.
    """
    if tokens.numel() > MAX_VERIFY_TOKENS:
        raise ValueError(f"{tokens.numel()} tokens to verify; at most {MAX_VERIFY_TOKENS}")
    # Without the report, transformers would fill a missing weight with random numbers.
    model, report = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    if problems := {kind: sorted(names) for kind, names in report.items() if names}:
        raise UserError(f"{directory} does not load as a whole model: {problems}")
    logits = model(input_ids=tokens.cpu()).logits
    if logits.shape != expected.shape:
        raise ValueError(
            f"expected logits have shape {list(expected.shape)}; the export gives "
            f"{list(logits.shape)}"
        )
    return logit_difference(logits, expected.to(logits))


def logit_difference(logits: Tensor, expected: Tensor) -> LogitDifference:
    """The largest difference of two tensors of one shape."""
    absolute = (logits - expected).abs().max()
    relative = absolute / expected.abs().max()
    # NaN would compare as "not larger" with any tolerance.
    return LogitDifference(*(math.inf if x.isnan() else x.item() for x in (absolute, relative)))
