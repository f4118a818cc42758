"""What a recipe's numbers should make its author think twice about: one sentence each."""

from collections.abc import Iterator

from diffmegatron.config.schema import ModelConfig, Recipe
from diffmegatron.errors import UserError
from diffmegatron.model.accounting import (
    ACCELERATORS,
    StageMemory,
    count_parameters,
    memory_by_stage,
)
from diffmegatron.plan.layout import GIB, USABLE_SHARE, Layout, ranks_in_words
from diffmegatron.plan.timing import GPUS_PER_NODE

# The largest models of the paper, and the learning rate that it lowers for them (appendix E).
LARGE_MODEL, LARGE_MODEL_LR = 5e9, 7.5e-5


def warnings(
    recipe: Recipe, layout: Layout, memory: tuple[StageMemory, ...], hardware: str
) -> tuple[str, ...]:
    """All sentences on a recipe on a layout, whose memory is known."""
    return (
        *_model_warnings(recipe.model),
        *_stability_warnings(recipe),
        *_layout_warnings(recipe, layout),
        *_memory_warnings(recipe, layout, memory, hardware),
    )


def _model_warnings(model: ModelConfig) -> Iterator[str]:
    """Where a differential model's sizes suggest heads halved twice, or leave what was tried."""
    heads = f"model.num_heads {model.num_heads}"
    width = model.num_attention_heads * model.head_dim
    if not model.is_differential:
        return
    if model.num_heads < 8:
        yield (
            f"{heads} is fewer than any model of the paper has; its authors advise more than 8 "
            "differential heads"
        )
    if width < model.hidden_size:
        yield (
            f"{heads} x 2 x head_dim {model.head_dim} is {width}, narrower than hidden_size "
            f"{model.hidden_size}; num_heads counts differential heads, so halve it once only"
        )
    if model.head_dim > 128:
        yield (
            f"model.head_dim {model.head_dim} is above the paper's 128; num_heads counts "
            f"differential heads, so halve it once only: {model.hidden_size / 256:g} heads of 128 "
            "fill hidden_size"
        )
    if not model.has_headwise_norm:
        yield (
            "model.headwise_norm is off; without it the paper's 1.4B model ended at a validation "
            "loss of 3.122 instead of 3.062 (table 6)"
        )


def _stability_warnings(recipe: Recipe) -> Iterator[str]:
    large = count_parameters(recipe.model).without_embeddings > LARGE_MODEL
    if recipe.model.is_differential and large and recipe.optimizer.lr > LARGE_MODEL_LR:
        yield (
            f"optimizer.lr {recipe.optimizer.lr:g} is above the {LARGE_MODEL_LR:g} that the paper "
            "takes from 6.8B on; loss spikes with a rising gradient norm were reported at 7B"
        )


def _layout_warnings(recipe: Recipe, layout: Layout) -> Iterator[str]:
    if layout.tensor > GPUS_PER_NODE:
        yield (
            f"parallel.tensor {layout.tensor} reaches beyond a node of {GPUS_PER_NODE} GPUs; "
            "parallel.pipeline costs less between nodes"
        )
    if layout.tensor > 1 and not layout.sequence_parallel:
        yield (
            f"parallel.sequence_parallel is off with parallel.tensor {layout.tensor}; on, it "
            "shards the norms' activations at no cost"
        )
    if recipe.recompute.granularity == "selective":
        yield (
            "recompute.granularity is 'selective'; every fused attention kernel computes its "
            "scores again anyway, so it saves little: 'full' saves memory, 'none' time"
        )
    if layout.microbatches < layout.pipeline:
        yield (
            f"{layout.microbatches} microbatches do not fill parallel.pipeline {layout.pipeline} "
            f"stages; fewer data-parallel ranks than {layout.data} would"
        )


def _memory_warnings(
    recipe: Recipe, layout: Layout, memory: tuple[StageMemory, ...], hardware: str
) -> Iterator[str]:
    needed = max(stage.total for stage in memory) / GIB
    available = ACCELERATORS[hardware].memory_gib
    if needed <= USABLE_SHARE * available:
        return
    gpus = [name for name, gpu in ACCELERATORS.items() if needed <= USABLE_SHARE * gpu.memory_gib]
    known = ", ".join(gpus) or "no known GPU"
    sentence = (
        f"on {ranks_in_words(layout.world_size)} each needs an estimated {needed:.1f} GiB, more "
        f"than {USABLE_SHARE:.0%} of {hardware}'s {available:g} GiB; it fits {known}"
    )
    enough = _enough_ranks(recipe, layout, USABLE_SHARE * available)
    yield sentence + (f", and {enough} ranks fit into {available:g} GiB" if enough else "")


def _enough_ranks(recipe: Recipe, layout: Layout, available_gib: float) -> int | None:
    """Ranks that fit, found by doubling the data-parallel size; None where that never fits."""
    training = recipe.training
    most = training.global_batch_size // training.micro_batch_size
    data = layout.data
    while data <= most and most % data == 0:
        ranks = recipe.parallel.model_ranks * data
        try:
            memory = memory_by_stage(recipe, ranks)
        except UserError:  # too few microbatches are left for an interleaved pipeline
            return None
        if max(stage.total for stage in memory) <= available_gib * GIB:
            return ranks
        data *= 2
    return None
