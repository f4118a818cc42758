"""The parallel layout of a recipe on a number of ranks, as values to print."""

from dataclasses import dataclass
from typing import Self

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting.activations import context_communication

GIB = 2**30
# Share of a GPU's memory that a plan may use. CUDA, NCCL, workspaces and fragmentation take the
# rest.
USABLE_SHARE = 0.9


@dataclass(frozen=True)
class RankLayout:
    """The parallel layout of a recipe on a number of ranks.

    Attributes:
        context_communication: None without context parallelism.
        virtual_pipeline: number of virtual stages per pipeline rank.
        recompute: activation recomputation in words, such as ``none`` or ``full, uniform 1``.
        micro_batch_size: number of sequences in a microbatch.
        microbatches: number of microbatches per step on a data-parallel rank.
    """

    world_size: int
    tensor: int
    context: int
    context_communication: str | None
    pipeline: int
    virtual_pipeline: int
    data: int
    sequence_parallel: bool
    zero_stage: int
    offload_optimizer: bool
    recompute: str
    micro_batch_size: int
    microbatches: int

    @classmethod
    def of(cls, recipe: Recipe, world_size: int) -> Self:
        """Return the layout of a recipe on ``world_size`` ranks."""
        parallel = recipe.parallel
        return cls(
            world_size=world_size,
            tensor=parallel.tensor,
            context=parallel.context,
            context_communication=context_communication(recipe),
            pipeline=parallel.pipeline,
            virtual_pipeline=parallel.virtual_pipeline,
            data=recipe.data_parallel(world_size),
            sequence_parallel=parallel.sequence_parallel,
            zero_stage=parallel.zero_stage,
            offload_optimizer=parallel.offload_optimizer,
            recompute=_recompute_in_words(recipe),
            micro_batch_size=recipe.training.micro_batch_size,
            microbatches=recipe.num_microbatches(world_size),
        )


def ranks_in_words(count: int) -> str:
    """Return a number of ranks in words, such as ``1 rank`` or ``2 ranks``."""
    return "1 rank" if count == 1 else f"{count} ranks"


def nodes_in_words(count: int) -> str:
    """Return a number of nodes in words, such as ``1 node`` or ``2 nodes``."""
    return "1 node" if count == 1 else f"{count} nodes"


def _recompute_in_words(recipe: Recipe) -> str:
    recompute = recipe.recompute
    if recompute.granularity != "full":
        return recompute.granularity
    return f"full, {recompute.method} {recompute.layers}"
