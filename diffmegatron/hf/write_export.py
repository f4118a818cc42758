"""Write weights as a directory that plain ``transformers`` can load, and verify its logits."""

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_NAME, AutoModelForCausalLM, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import Tokenizer, check_vocabulary
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_json, shorten
from diffmegatron.hf.atomic_directory import atomic_directory
from diffmegatron.hf.configuration import hugging_face_class, to_hf_config, write_config
from diffmegatron.hf.kinds.network import ONLY_IMPORTED
from diffmegatron.hf.modeling import remote_files
from diffmegatron.hf.pretrained_files import Original
from diffmegatron.hf.tokenizer import write_tokenizer
from diffmegatron.hf.weight_mapping import Weights, table, to_hf

# Maximum bytes of the weights in a file. A larger weight gets a file of its own.
MAX_SHARD_BYTES = 4 * 2**30
MAX_VERIFY_TOKENS = 256
# Reason for different logits of two float32 networks with equal weights.
SUMMATION = "float32 sums depend on their order"


class LogitDifference(NamedTuple):
    """Largest difference of logits; ``relative`` is ``absolute`` / largest |expected logit|."""

    absolute: float
    relative: float


class Verified(NamedTuple):
    """Result of a passed comparison of logits; ``reason`` explains why the logits may differ."""

    absolute: float
    relative: float
    tolerance: float
    reason: str

    def __str__(self) -> str:
        return (
            f"logits differ by at most {self.absolute:.1e} ({self.relative:.1e} relative, up to "
            f"{self.tolerance:.0e} passes: {self.reason})"
        )


def write_export(
    weights: Weights,
    recipe: Recipe,
    tokenizer: Tokenizer,
    out: Path,
    dtype: torch.dtype,
    *,
    original: Original | None = None,
    step: int = 0,
    chat: bool = False,
    verify: Callable[[Path], Verified] | None = None,
) -> Verified | None:
    """Write a model and its tokenizer as a directory that its Hugging Face class can load.

    If ``transformers`` lacks the class, its code is copied into the export. Users then load the
    model with ``trust_remote_code=True``. ``out`` is written completely or not at all.

    Args:
        weights: unsharded weights with Megatron's names. A generator is read one weight at a time.
        dtype: dtype of the stored weights, unless the export keeps the dtypes of ``original``.
            Weights that must not be rounded, such as lambda vectors, are stored exactly.
        original: pretrained model that the run started from. If its class can compute the recipe's
            attention, the export keeps the class, the dtypes and the configuration of this model,
            with the recipe's changes.
        step: number of completed training steps, on which lambda of DEX depends.
        chat: whether to add a chat template to the tokenizer.
        verify: function to call with the path of the complete temporary directory. If it raises an
            error, ``out`` is not written. Its result is returned.
    """
    described = hugging_face_class(recipe.model)
    if original is not None and not original.can_compute(described):
        original = None
    if original is None and described.model_type == "qwen2":
        raise UserError(ONLY_IMPORTED)
    config = to_hf_config(recipe, tokenizer.end_of_document, dtype)
    check_vocabulary(tokenizer.name, tokenizer.vocab_size, recipe.model.tokens)
    with atomic_directory(out) as directory:
        if original is None:
            write_config(config, directory)
            ids = ("bos_token_id", "eos_token_id", "pad_token_id")
            generation = GenerationConfig(**dict.fromkeys(ids, tokenizer.end_of_document))
            generation.save_pretrained(directory)
        else:
            original.write_config(recipe, directory)
        for file in remote_files(described.model_type):
            shutil.copy(file, directory)
        write_tokenizer(tokenizer, recipe.training.seq_length, directory, chat=chat)
        dtype_of = _stored_dtypes(recipe.model, original, dtype)
        converted = to_hf(weights, recipe.model, step)
        _write_weights(((name, each, dtype_of(name, each)) for name, each in converted), directory)
        return None if verify is None else verify(directory)


def _stored_dtypes(
    model: ModelConfig, original: Original | None, dtype: torch.dtype
) -> Callable[[str, Tensor], torch.dtype]:
    """Return a function from a tensor's name and value to the dtype in which to store it.

    It is the tensor's dtype in ``original``, or ``dtype`` if ``original`` is None. Exception: a
    tensor of a rule with ``keep_fp32`` is float32, unless ``original``'s dtype holds it exactly.
    """
    keep_fp32 = {name for rule in table(model) if rule.keep_fp32 for name in rule.theirs}

    def dtype_of(name: str, tensor: Tensor) -> torch.dtype:
        usual = dtype if original is None else original.dtype(name)
        if name not in keep_fp32:
            return usual
        is_exact = original is not None and torch.equal(tensor.to(usual).float(), tensor.float())
        return usual if is_exact else torch.float32

    return dtype_of


def _write_weights(weights: Iterable[tuple[str, Tensor, torch.dtype]], directory: Path) -> None:
    """Write safetensors files with the names that ``transformers`` expects.

    If there are several files, an index lists the file of each weight. huggingface_hub is not used,
    because it would need all weights in memory at the same time.
    """
    shards: list[list[str]] = []
    total_size = 0
    for shard in _in_shards(weights):
        shards.append(list(shard))
        total_size += _num_bytes(shard)
        _save(shard, directory / f"shard-{len(shards):05d}.safetensors")
    if len(shards) == 1:
        (directory / "shard-00001.safetensors").rename(directory / SAFE_WEIGHTS_NAME)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number:05d}.safetensors").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    (directory / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


def _in_shards(
    weights: Iterable[tuple[str, Tensor, torch.dtype]],
) -> Iterator[dict[str, Tensor]]:
    """Yield one dict of converted weights per file; it is cleared before the next file."""
    shard: dict[str, Tensor] = {}
    for name, tensor, dtype in weights:
        if shard and _num_bytes(shard) + tensor.numel() * dtype.itemsize > MAX_SHARD_BYTES:
            yield shard
            shard.clear()
        # safetensors refuses tensors that share memory, so copy views.
        shard[name] = tensor.detach().to(
            "cpu", dtype, copy=True, memory_format=torch.contiguous_format
        )
    yield shard


def _num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        path.touch()
        mode = path.stat().st_mode
        # Older versions of transformers require the framework in the metadata.
        save_file(tensors, path, metadata={"format": "pt"})
        # safetensors makes the file readable only by its owner, so restore the umask's mode.
        path.chmod(mode)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {error}") from error


@torch.no_grad()
def verify_export(directory: Path, tokens: Tensor, expected: Tensor) -> LogitDifference:
    """Load a Hugging Face model in fp32 on the CPU; compare its logits with ``expected``.

    ``tokens`` [b, s] has at most ``MAX_VERIFY_TOKENS`` ids. ``expected`` is [b, s, vocab_size].
    """
    if tokens.numel() > MAX_VERIFY_TOKENS:
        raise ValueError(f"{tokens.numel()} tokens to verify; at most {MAX_VERIFY_TOKENS}")
    try:
        # transformers fills missing weights with random numbers, and lists them in the report.
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            # Without this, config.json could name an attention kernel to download.
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=has_own_code(directory),
            output_loading_info=True,
            use_safetensors=True,
        )
    except Exception as error:  # transformers raises many classes of exceptions here.
        raise UserError(
            f"{format_path(directory)} does not load as a model: {shorten(str(error))}"
        ) from None
    if problems := {kind: sorted(names) for kind, names in report.items() if names}:
        raise UserError(f"{directory} does not load as a whole model: {problems}")
    logits = model(input_ids=tokens.cpu()).logits
    if logits.shape != expected.shape:
        raise ValueError(
            f"expected logits have shape {list(expected.shape)}; {directory} gives "
            f"{list(logits.shape)}"
        )
    return logit_difference(logits, expected.to(logits))


def loading_code(directory: Path, name: str) -> str:
    """Return lines of Python that load the export in a directory, by its name ``name``."""
    path = repr(name)
    code = ", trust_remote_code=True" if has_own_code(directory) else ""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({path}{code})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({path}{code})"
    )


def has_own_code(directory: Path) -> bool:
    """Return whether a directory has an exact copy of this package's code for its model type."""
    model_type = read_json(directory / CONFIG_NAME, dict[str, Any])["model_type"]
    ours = remote_files(model_type)
    return bool(ours) and all(
        (directory / file.name).read_bytes() == file.read_bytes() for file in ours
    )


def logit_difference(logits: Tensor, expected: Tensor) -> LogitDifference:
    """Return the largest absolute and relative difference; infinity if a value is NaN."""
    absolute = (logits - expected).abs().max()
    relative = absolute / expected.abs().max()
    # ``NaN > tolerance`` is false, so a caller could accept NaN.
    return LogitDifference(*(math.inf if x.isnan() else x.item() for x in (absolute, relative)))
