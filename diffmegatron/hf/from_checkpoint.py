"""``diffmegatron export``: a checkpoint of any layout as a Hugging Face directory, verified."""

from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from diffmegatron.checkpoint.contents import WEIGHT, Checkpoint, open_checkpoint
from diffmegatron.checkpoint.manifest import read_manifest, verify_contents
from diffmegatron.config.parallel import ParallelConfig, RecomputeConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.hf.export import LogitDifference, verify_export, write_export
from diffmegatron.model.build import DTYPES, build_model
from diffmegatron.model.shards import parameter_shards
from diffmegatron.parallel.topology import process_groups

# float32 leaves the order of summation. In a bf16 file the headwise norm is folded into the
# output projection before rounding, in training it multiplies after: each rounds by up to 2^-9.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}

_SAMPLE = (
    "def attention(q, k, v):\n    return softmax(q @ k.T / sqrt(d)) @ v\n\n"
    "The difference of two softmax maps cancels what both attend to."
)


def export_checkpoint(
    directory: Path, out: Path, *, verify: bool = True, tokens: Tensor | None = None
) -> LogitDifference | None:
    """Write a checkpoint as Hugging Face files and compare the logits of what was written.

    Args:
        directory: of the checkpoint; its layout does not matter.
        out: directory to create.
        verify: whether to load the files with ``transformers`` and compare with the training
            network, in this process and float32 arithmetic: both must fit its memory.
        tokens: ids [b, s] to compare on, at most 256; default: a line of text.

    Returns:
        LogitDifference: of the comparison, None without.

    Raises:
        UserError: the checkpoint is unusable, Hugging Face cannot compute this network, ``out``
            is in use, or the logits differ by more than rounding explains; then ``out`` is not
            created.
    """
    transformers_logging.disable_progress_bar()
    checkpoint = open_checkpoint(directory)
    # Damaged bytes would be on both sides of the comparison of logits.
    verify_contents(directory, read_manifest(directory).files)
    recipe = checkpoint.recipe
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    dtype = DTYPES[recipe.training.precision]
    differences: list[LogitDifference] = []

    def compare(written: Path) -> None:
        ids = _sample(tokenizer) if tokens is None else tokens
        difference = verify_export(written, ids, training_logits(checkpoint, ids))
        if not difference.relative <= TOLERANCE[dtype]:
            raise UserError(
                f"the exported logits differ from the training network's by "
                f"{difference.relative:.1e} relative, more than {TOLERANCE[dtype]:g}; "
                f"{out} was not written"
            )
        differences.append(difference)

    write_export(
        checkpoint.weights(), recipe, tokenizer, out, dtype, verify=compare if verify else None
    )
    return differences[0] if differences else None


@torch.no_grad()
def training_logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """Logits [b, s, vocab] float32 of the Megatron network with a checkpoint's weights.

    The weights are rounded to the precision of the run, the arithmetic is float32.
    """
    precision = DTYPES[checkpoint.recipe.training.precision]
    recipe = _single_process(checkpoint.recipe)
    with process_groups(recipe.parallel, recipe.training.seed) as topology:
        network = build_model(recipe, topology, initial_weights=False).eval()
        for parameter, shards in parameter_shards(network).items():
            for shard in shards:
                rounded = torch.float32 if ".core_attention." in shard.name else precision
                value = checkpoint.tensors.box(WEIGHT, shard.name, shard.offset, shard.shape)
                shard.view(parameter.data).copy_(value.to(rounded))
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        logits = network(tokens.to(topology.device), positions.to(topology.device), None)
        return logits.float().cpu()


def _single_process(recipe: Recipe) -> Recipe:
    training = recipe.training.model_copy(update={"precision": "fp32"})
    return recipe.model_copy(
        update={
            "training": training,
            "parallel": ParallelConfig(),
            "recompute": RecomputeConfig(),
        }
    )


def _sample(tokenizer: Tokenizer) -> Tensor:
    return torch.tensor(tokenizer.encode(_SAMPLE), dtype=torch.int64)[None, :128]
