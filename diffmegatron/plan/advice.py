"""Warnings of ``plan``: likely mistakes, networks without an export, slow settings, memory."""

from collections.abc import Iterator

from diffmegatron.config.fp8_products import FP8_CAPABILITIES
from diffmegatron.config.schema import Recipe
from diffmegatron.config.width_scaling import matrix_rate
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds import export_problem
from diffmegatron.model.accounting.hardware import ACCELERATORS, GPUS_PER_NODE
from diffmegatron.model.accounting.memory import StageMemory, peak_memory
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.plan.rank_layout import GIB, USABLE_SHARE, RankLayout, ranks_in_words


def warnings(
    recipe: Recipe, layout: RankLayout, memory: tuple[StageMemory, ...], hardware: str
) -> tuple[str, ...]:
    """Return the warnings about a recipe, one sentence each.

    ``memory`` has one entry per pipeline stage, and ``hardware`` is a name in ``ACCELERATORS``.
    """
    model = recipe.model
    unexportable = export_problem(
        model.attention,
        model.hidden_size,
        model.num_layers,
        from_scratch=recipe.checkpoint.start_from is None,
    )
    return (
        *model.attention.warnings(
            model.hidden_size,
            count_parameters(model).without_embeddings,
            recipe.optimizer.lr * matrix_rate(recipe),
        ),
        *filter(None, [unexportable]),
        *_window_warnings(recipe),
        *_rotary_warnings(recipe),
        *_layout_warnings(recipe, layout),
        *_fp8_warnings(recipe, hardware),
        *_memory_warnings(recipe, layout, memory, hardware),
    )


def _window_warnings(recipe: Recipe) -> Iterator[str]:
    length = recipe.training.seq_length
    windows = {kind.window for kind in recipe.model.attention.kinds if kind.window is not None}
    for window in sorted(each for each in windows if each >= length):
        yield (
            f"model.attention.window {window} hides nothing in sequences of training.seq_length "
            f"{length} tokens; give fewer, or keep it for longer sequences after training"
        )


def _rotary_warnings(recipe: Recipe) -> Iterator[str]:
    scaling, length = recipe.model.rope_scaling, recipe.training.seq_length
    if scaling is None or scaling.kind != "yarn":
        return
    reach = scaling.factor * scaling.original_length
    if reach < length:
        yield (
            f"model.rope_scaling.factor {scaling.factor:g} x original_length "
            f"{scaling.original_length} reaches {reach:,.0f} tokens, and training.seq_length is "
            f"{length}; give factor {length / scaling.original_length:g}"
        )


def _layout_warnings(recipe: Recipe, layout: RankLayout) -> Iterator[str]:
    if layout.tensor > GPUS_PER_NODE:
        yield (
            f"parallel.tensor {layout.tensor} exceeds a node of {GPUS_PER_NODE} GPUs; "
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
            f"stages; use fewer than {layout.data} data-parallel ranks"
        )


def _fp8_warnings(recipe: Recipe, hardware: str) -> Iterator[str]:
    fp8, gpu = recipe.training.fp8, ACCELERATORS[hardware]
    if fp8 is not None and gpu.capability < FP8_CAPABILITIES[fp8.recipe]:
        needed, found = (
            ".".join(map(str, each)) for each in (FP8_CAPABILITIES[fp8.recipe], gpu.capability)
        )
        yield (
            f"training.fp8.recipe {fp8.recipe!r} needs compute capability {needed}, and {hardware} "
            f"has {found}; training would refuse it"
        )


def _memory_warnings(
    recipe: Recipe, layout: RankLayout, memory: tuple[StageMemory, ...], hardware: str
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
    limit = USABLE_SHARE * available
    remedies = list(_remedies(recipe, layout, limit))
    if not remedies:
        # Context and pipeline parallelism can help, but have too many combinations to try here.
        remedies = [
            "diffmegatron plan --search GPUS ranks the layouts that fit, and the recipes of "
            "configs/at_scale have some"
        ]
    yield f"{sentence}; {', or '.join(remedies)}"


def _remedies(recipe: Recipe, layout: RankLayout, limit_gib: float) -> Iterator[str]:
    """Yield a text for each single change that makes the recipe fit into ``limit_gib``.

    The global batch size and the sequence length define the experiment, so they stay unchanged.
    """
    ranks = layout.world_size
    for size in range(recipe.training.micro_batch_size - 1, 0, -1):
        training = recipe.training.model_copy(update={"micro_batch_size": size})
        if _fits(recipe.model_copy(update={"training": training}), ranks, limit_gib):
            yield f"training.micro_batch_size={size} fits"
            break
    if recipe.recompute.granularity != "full":
        again = recipe.recompute.model_copy(update={"granularity": "full"})
        if _fits(recipe.model_copy(update={"recompute": again}), ranks, limit_gib):
            yield "recompute.granularity=full fits"
    if enough := _enough_ranks(recipe, layout, limit_gib):
        yield f"{enough} ranks fit"


def _fits(recipe: Recipe, ranks: int, limit_gib: float) -> bool:
    try:
        return peak_memory(recipe, ranks) <= limit_gib * GIB
    except UserError:  # The layout cannot divide the batch.
        return False


def _enough_ranks(recipe: Recipe, layout: RankLayout, available_gib: float) -> int | None:
    """Double the data-parallel size until the recipe fits, and return the number of ranks.

    Return None if no doubling fits.
    """
    training = recipe.training
    most = training.global_batch_size // training.micro_batch_size
    data = layout.data
    while data <= most and most % data == 0:
        ranks = recipe.parallel.model_ranks * data
        if _fits(recipe, ranks, available_gib):
            return ranks
        data *= 2
    return None
