"""Process groups of a layout, and this rank's place in each."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state as megatron_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import distributed
from torch.distributed import ProcessGroup

from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.errors import UserError
from diffmegatron.parallel.cpu import without_cuda
from diffmegatron.parallel.default_group import TIMEOUT, default_group, own_device


@dataclass(frozen=True)
class ParallelState:
    """This rank's place in the layout, and its device."""

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
        """True if this rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True if this rank holds the output layer and computes the loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the log, the metrics and the progress line."""
        return self.rank == 0

    @property
    def data_group(self) -> ProcessGroup:
        """Ranks that hold the same shard of the model: data x context parallel."""
        return megatron_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def tensor_group(self) -> ProcessGroup:
        """Ranks that share each layer of this stage."""
        return megatron_state.get_tensor_model_parallel_group()

    @property
    def context_group(self) -> ProcessGroup:
        """Ranks that share each sequence."""
        return megatron_state.get_context_parallel_group()

    @property
    def pipeline_group(self) -> ProcessGroup:
        """Ranks that hold the stages of the same model, one rank per stage."""
        return megatron_state.get_pipeline_model_parallel_group()

    @property
    def embedding_group(self) -> ProcessGroup:
        """Ranks of the first and the last stage, which share a tied embedding."""
        return megatron_state.get_embedding_group()


class ModelParallelUnit:
    """The process groups in the form of DeepSpeed's argument ``mpu``.

    DeepSpeed's data parallelism is data times context parallelism here. The methods
    ``get_sequence_parallel_*`` are missing on purpose: with them ZeRO 1 and 2 sum gradients that
    ZeRO 3 averages.
    """

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the group over which ZeRO partitions."""
        return megatron_state.get_data_parallel_group(with_context_parallel=True)

    def get_data_parallel_rank(self) -> int:
        """Return the rank within :meth:`get_data_parallel_group`."""
        return megatron_state.get_data_parallel_rank(with_context_parallel=True)

    def get_data_parallel_world_size(self) -> int:
        """Return the size of :meth:`get_data_parallel_group`."""
        return megatron_state.get_data_parallel_world_size(with_context_parallel=True)

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the group of ranks that together hold one whole model."""
        return megatron_state.get_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        """Return the rank within :meth:`get_model_parallel_group`."""
        return distributed.get_rank(megatron_state.get_model_parallel_group())

    def get_model_parallel_world_size(self) -> int:
        """Return the size of :meth:`get_model_parallel_group`."""
        return distributed.get_world_size(megatron_state.get_model_parallel_group())

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Return the group of ranks that share each layer."""
        return megatron_state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_rank(self) -> int:
        """Return the rank within :meth:`get_tensor_model_parallel_group`."""
        return megatron_state.get_tensor_model_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the size of :meth:`get_tensor_model_parallel_group`."""
        return megatron_state.get_tensor_model_parallel_world_size()

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return the pipeline stage of this rank."""
        return megatron_state.get_pipeline_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return megatron_state.get_pipeline_model_parallel_world_size()


def fail_together(problem: str | None) -> None:
    """Raise the first problem of any rank on every rank, so that none waits for the others."""
    problems: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raise UserError(f"{found} (rank {rank})" if len(problems) > 1 else found)


@contextmanager
def process_groups(
    parallel: ParallelConfig, seed: int, timeout: timedelta = TIMEOUT
) -> Iterator[ParallelState]:
    """Start the process groups of a layout, and end them with the context.

    The ranks meet through the launcher's environment; without a launcher this process is the only
    rank. The backend is NCCL with one GPU per rank, or gloo without CUDA. An existing default group
    is used, and left to the caller.

    Args:
        parallel: layout whose sizes fill the ranks (``Recipe.data_parallel`` checks this).
        seed: base of Megatron's model-parallel random states.
        timeout: time limit of a collective.
    """
    device = own_device()
    with without_cuda(), default_group(timeout), _ending_new_groups():
        try:
            megatron_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tensor,
                pipeline_model_parallel_size=parallel.pipeline,
                virtual_pipeline_model_parallel_size=(
                    parallel.virtual_pipeline if parallel.virtual_pipeline > 1 else None
                ),
                context_parallel_size=parallel.context,
                # Only Megatron's own optimizer checkpoints use gloo groups beside NCCL's.
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(seed)
            yield _current_state(device)
        finally:
            megatron_state.destroy_model_parallel()


# Python 3.12 starts with some hundred frozen objects; more were frozen for an earlier layout.
_FROZEN_AT_START = 10_000


@contextmanager
def _ending_new_groups() -> Iterator[None]:
    """End the process groups that any code creates inside.

    Megatron's ``destroy_model_parallel`` only drops its references to some forty groups. Torch
    keeps the groups and their threads, fifty per layout with gloo, until the default group ends. A
    network also keeps its groups until the garbage collector finds its reference cycles.

    Older objects, mostly modules, are frozen for the collector and stay so: DeepSpeed runs it
    before and after each parameter group, a quarter of a second each time. Garbage is collected
    before, because the groups of a frozen network would keep their threads until the process ends.
    """
    existing = set(_groups())
    if gc.get_freeze_count() > _FROZEN_AT_START:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        for group in [each for each in _groups() if each not in existing]:
            distributed.destroy_process_group(group)
        gc.collect()


def _groups() -> list[ProcessGroup]:
    """Return this rank's process groups in order of creation, for which torch has no function."""
    return list(distributed.distributed_c10d._world.pg_map)


def _current_state(device: torch.device) -> ParallelState:
    return ParallelState(
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
