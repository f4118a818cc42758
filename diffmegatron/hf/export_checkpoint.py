"""``diffmegatron export``: write a checkpoint as a Hugging Face model, and verify its logits."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from diffmegatron.checkpoint.checkpoint_format import WEIGHT, Checkpoint, open_checkpoint
from diffmegatron.checkpoint.weights import load_network
from diffmegatron.config.parallel_config import ParallelConfig, RecomputeConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import LORA_A, LORA_B
from diffmegatron.config.trainable_patterns import is_lora
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds import in_one_call
from diffmegatron.hf.pretrained_files import Original, find_original
from diffmegatron.hf.weight_mapping import table
from diffmegatron.hf.write_export import SUMMATION, Verified, verify_export, write_export
from diffmegatron.model.build import DTYPES
from diffmegatron.parallel.parallel_state import process_groups

# Largest allowed difference of the logits, divided by the largest absolute logit. Keys are the
# results of `_rounded_differently`.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}

_SAMPLE = (
    "def attention(q, k, v):\n    return softmax(q @ k.T / sqrt(d)) @ v\n\n"
    "The difference of two softmax maps cancels what both attend to."
)


def export_checkpoint(
    directory: Path,
    out: Path,
    *,
    serving: bool = False,
    verify: bool = True,
    tokens: Tensor | None = None,
) -> Verified | None:
    """Write a checkpoint as a Hugging Face model; compare its logits with the training network's.

    If an error occurs, ``out`` is not written. Without ``verify``, the result is None.

    Args:
        directory: directory of the checkpoint.
        serving: whether to export ``diff_v1`` as a class with one attention call per layer, which
            serving engines require. The exports of all other kinds have such a class in any case.
        verify: whether to compare the logits. Both models must then fit into memory in float32.
        tokens: ids [b, s] for the comparison, b * s <= 256; None: the ids of a short built-in text.
    """
    transformers_logging.disable_progress_bar()
    # Verify the checksums, because the comparison cannot find damaged weights: both models would
    # have them.
    checkpoint = open_checkpoint(directory)
    recipe = serving_form(checkpoint.recipe) if serving else checkpoint.recipe
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    original = find_original(recipe)
    dtype = DTYPES[recipe.training.precision]
    step = checkpoint.state["step"]
    layouts = (checkpoint.state["data"] or {}).get("layouts")
    rounded = _rounded_differently(recipe, dtype, original, step)
    tolerance = TOLERANCE[rounded]

    def compare(written: Path) -> Verified:
        ids = sample(tokenizer) if tokens is None else tokens
        difference = verify_export(written, ids, training_logits(checkpoint, ids))
        if not difference.relative <= tolerance:
            raise UserError(
                f"the exported logits differ from the training network's by "
                f"{difference.relative:.1e} relative, more than {tolerance:g}; "
                f"{out} was not written"
            )
        reason = SUMMATION
        if rounded in _NAMES:
            reason = (
                f"the export rounds weights to {_NAMES[rounded]} after it has multiplied other "
                "weights into them, and training rounded them before"
            )
        return Verified(*difference, tolerance, reason)

    return write_export(
        merged_weights(checkpoint),
        recipe,
        tokenizer,
        out,
        dtype,
        original=original,
        step=step,
        # True if the training data had chats, all of them in ChatML.
        chat=isinstance(layouts, list) and "chat" in layouts and "template" not in layouts,
        verify=compare if verify else None,
    )


def serving_form(recipe: Recipe) -> Recipe:
    """Return a recipe of the same network whose Hugging Face class has one call per layer."""
    attention = in_one_call(recipe.model.attention, recipe.model.hidden_size)
    model = recipe.model.model_copy(update={"attention": attention})
    return recipe.model_copy(update={"model": model})


def _rounded_differently(
    recipe: Recipe, dtype: torch.dtype, original: Original | None, step: int
) -> torch.dtype:
    """Return the key of ``TOLERANCE`` for the comparison.

    If ``original`` is None and the export computes no weight from several weights, the key is
    float32. Otherwise the key is ``dtype`` or ``original.usual_dtype``, whichever is coarser.
    """
    is_folded = recipe.model.lora is not None or any(
        rule.folds for rule in table(recipe.model, step)
    )
    if original is None and not is_folded:
        return torch.float32
    stored = dtype if original is None else original.usual_dtype
    return max(dtype, stored, key=TOLERANCE.__getitem__)


def merged_weights(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and unsharded float32 value of each weight, including LoRA's update."""
    lora, tensors = checkpoint.recipe.model.lora, checkpoint.tensors
    adapted = {name.removesuffix(LORA_A) for name in tensors.names() if name.endswith(LORA_A)}
    for name, weight in checkpoint.weights():
        place = name.removesuffix("weight")
        if lora is not None and place in adapted:
            low, high = (tensors.read_tensor(WEIGHT, place + each) for each in (LORA_A, LORA_B))
            weight += lora.scale * (high @ low)
        if not is_lora(name):
            yield name, weight


@torch.no_grad()
def training_logits(checkpoint: Checkpoint, tokens: Tensor) -> Tensor:
    """Return the Megatron network's logits for ids [b, s]: float32 [b, s, vocabulary], on the CPU.

    The weights are rounded as in training, and the arithmetic is float32. Padding rows of the
    vocabulary have no logits.
    """
    recipe = checkpoint.recipe
    # On a GPU, the Triton kernels compute float32 products in TF32, whose error would exceed the
    # tolerance.
    exact = {"precision": "fp32", "attention_backend": "reference"}
    single_process = {"parallel": ParallelConfig(), "recompute": RecomputeConfig()}
    training = recipe.training.model_copy(update=exact)
    recipe = recipe.model_copy(update={"training": training, **single_process})
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        network = load_network(checkpoint, recipe, parallel_state)
        logits = network(tokens.to(parallel_state.device))
        return logits[..., : recipe.model.tokens].float().cpu()


def sample(tokenizer: Tokenizer) -> Tensor:
    """Return token ids [1, s], s <= 128, of a short text for the comparison of logits."""
    return torch.tensor(tokenizer.encode(_SAMPLE), dtype=torch.int64)[None, :128]
