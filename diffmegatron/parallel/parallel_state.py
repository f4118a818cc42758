"""Process groups of a parallel layout, and this rank's index in each group."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state as megatron_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import distributed
from torch.distributed import ProcessGroup

from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.errors import UserError
from diffmegatron.parallel.cpu import without_cuda
from diffmegatron.parallel.default_group import default_group, own_device

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelState:
    """This rank's place in the parallel layout, and its device.

    ``virtual_pipeline_size`` is the number of virtual stages per rank. ``data_size`` and
    ``data_rank`` count all context-parallel ranks of a sequence as one rank.
    """

    rank: int
    world_size: int
    device: torch.device
    tensor_size: int
    tensor_rank: int
    pipeline_size: int
    pipeline_rank: int
    virtual_pipeline_size: int
    context_size: int
    context_rank: int
    data_size: int
    data_rank: int

    @property
    def is_first_stage(self) -> bool:
        """True if this rank is in the first pipeline stage, which has the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank is in the last pipeline stage, which has the output layer and loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the metrics and prints the progress lines."""
        return self.rank == 0

    @property
    def data_context_group(self) -> ProcessGroup:
        """Data x context parallel ranks, which have the same shard of the model."""
        return megatron_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def stage_group(self) -> ProcessGroup:
        """Tensor x data x context parallel ranks, which have the same pipeline stage."""
        return megatron_state.get_tensor_and_data_parallel_group(with_context_parallel=True)

    @property
    def tensor_group(self) -> ProcessGroup:
        """Tensor-parallel ranks, which shard the layers of this pipeline stage."""
        return megatron_state.get_tensor_model_parallel_group()

    @property
    def context_group(self) -> ProcessGroup:
        """Context-parallel ranks, which shard each sequence."""
        return megatron_state.get_context_parallel_group()

    @property
    def pipeline_group(self) -> ProcessGroup:
        """Ranks of one pipeline, one rank per stage."""
        return megatron_state.get_pipeline_model_parallel_group()

    @property
    def embedding_group(self) -> ProcessGroup:
        """Ranks of a pipeline's first and last stage, which share a tied embedding."""
        return megatron_state.get_embedding_group()


class ModelParallelUnit:
    """Adapter that passes Megatron's process groups to DeepSpeed, as its argument ``mpu``.

    ZeRO partitions over the data x context parallel ranks. The methods ``get_sequence_parallel_*``
    are missing on purpose. If they existed, ZeRO 1 and 2 would sum gradients over the
    context-parallel ranks, but ZeRO 3 would average the gradients.
    """

    get_data_parallel_group = staticmethod(
        partial(megatron_state.get_data_parallel_group, with_context_parallel=True)
    )
    get_data_parallel_world_size = staticmethod(
        partial(megatron_state.get_data_parallel_world_size, with_context_parallel=True)
    )
    get_model_parallel_group = staticmethod(megatron_state.get_model_parallel_group)
    get_tensor_model_parallel_rank = staticmethod(megatron_state.get_tensor_model_parallel_rank)
    get_tensor_model_parallel_world_size = staticmethod(
        megatron_state.get_tensor_model_parallel_world_size
    )
    get_pipeline_model_parallel_world_size = staticmethod(
        megatron_state.get_pipeline_model_parallel_world_size
    )

    def get_model_parallel_rank(self) -> int:
        """Return this rank's index among the ranks that together have one complete model."""
        return distributed.get_rank(megatron_state.get_model_parallel_group())

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks that together have one complete model."""
        return distributed.get_world_size(megatron_state.get_model_parallel_group())


def fail_together(problem: str | None) -> None:
    """Raise a UserError on all ranks if a rank passes a ``problem``; every rank must call this."""
    problems: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raise UserError(f"{found} (rank {rank})" if len(problems) > 1 else found)


@contextmanager
def errors_on_all_ranks() -> Iterator[None]:
    """Raise one rank's UserError on all ranks; every rank must enter this context."""
    problem = None
    try:
        yield
    except UserError as error:
        problem = str(error)
    fail_together(problem)


def from_rank_0(function: Callable[[], T]) -> T:
    """Call a function on rank 0, and return its result on all ranks; every rank must call this."""
    results: list[Any] = [None]
    with errors_on_all_ranks():
        if distributed.get_rank() == 0:
            results = [function()]
    distributed.broadcast_object_list(results, src=0)
    result: T = results[0]
    return result


@contextmanager
def process_groups(parallel: ParallelConfig, seed: int) -> Iterator[ParallelState]:
    """Create the process groups of a layout, and destroy them at the end of the context.

    ``seed`` sets Megatron's random states.
    """
    device = own_device()
    with without_cuda(), default_group(), _ending_new_groups():
        try:
            megatron_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                virtual_pipeline_model_parallel_size=(
                    parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
                ),
                context_parallel_size=parallel.context,
                # Only Megatron's own optimizer checkpoints need additional gloo groups.
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(seed)
            yield ParallelState(
                rank=distributed.get_rank(),
                world_size=distributed.get_world_size(),
                device=device,
                tensor_size=megatron_state.get_tensor_model_parallel_world_size(),
                tensor_rank=megatron_state.get_tensor_model_parallel_rank(),
                pipeline_size=megatron_state.get_pipeline_model_parallel_world_size(),
                pipeline_rank=megatron_state.get_pipeline_model_parallel_rank(),
                virtual_pipeline_size=(
                    megatron_state.get_virtual_pipeline_model_parallel_world_size() or 1
                ),
                context_size=megatron_state.get_context_parallel_world_size(),
                context_rank=megatron_state.get_context_parallel_rank(),
                data_size=megatron_state.get_data_parallel_world_size(),
                data_rank=megatron_state.get_data_parallel_rank(),
            )
        finally:
            megatron_state.destroy_model_parallel()


# The imported libraries have more objects, and a collection of those takes a quarter of a second.
_FEW_OBJECTS = 200_000


@contextmanager
def _ending_new_groups() -> Iterator[None]:
    """Destroy all process groups that are created inside the context.

    Megatron's ``destroy_model_parallel`` only drops its references to the groups. Without this
    context, each layout would leave about fifty threads under gloo.
    """
    # Torch has no public function that lists a rank's process groups.
    groups = distributed.distributed_c10d._world.pg_map
    existing = set(groups)
    # If an earlier context has frozen the imports, collect its garbage before the next freeze,
    # because the collector ignores frozen objects.
    if len(gc.get_objects()) < _FEW_OBJECTS:
        gc.collect()
    # DeepSpeed collects garbage often. Frozen objects make each collection faster.
    gc.freeze()
    try:
        yield
    finally:
        for group in [each for each in groups if each not in existing]:
            distributed.destroy_process_group(group)
        gc.collect()
