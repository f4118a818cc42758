"""Process groups: who this rank is, and which ranks share which part of the work."""

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
        """Whether this rank holds the embedding."""
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer and sees the loss."""
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the run: it writes the log, metrics and progress line."""
        return self.rank == 0

    @property
    def data_group(self) -> ProcessGroup:
        """The ranks that hold the same shard of the model: data x context parallel."""
        return megatron_state.get_data_parallel_group(with_context_parallel=True)

    @property
    def tensor_group(self) -> ProcessGroup:
        """The ranks that share each layer of this stage."""
        return megatron_state.get_tensor_model_parallel_group()

    @property
    def context_group(self) -> ProcessGroup:
        """The ranks that share each sequence."""
        return megatron_state.get_context_parallel_group()

    @property
    def pipeline_group(self) -> ProcessGroup:
        """The ranks that hold the other stages of this rank's shard."""
        return megatron_state.get_pipeline_model_parallel_group()

    @property
    def embedding_group(self) -> ProcessGroup:
        """The first and last stage, which share a tied embedding."""
        return megatron_state.get_embedding_group()


class ModelParallelUnit:
    """The interface DeepSpeed calls ``mpu``, which Megatron-core's module no longer has whole.

    DeepSpeed's data parallelism is ours times context parallelism. ``get_sequence_parallel_*`` is
    left out on purpose: with it ZeRO 1 and 2 sum gradients that ZeRO 3 averages.
    """

    def get_data_parallel_group(self) -> ProcessGroup:
        """Ranks over which ZeRO partitions."""
        return megatron_state.get_data_parallel_group(with_context_parallel=True)

    def get_data_parallel_rank(self) -> int:
        """Rank within :meth:`get_data_parallel_group`."""
        return megatron_state.get_data_parallel_rank(with_context_parallel=True)

    def get_data_parallel_world_size(self) -> int:
        """Size of :meth:`get_data_parallel_group`."""
        return megatron_state.get_data_parallel_world_size(with_context_parallel=True)

    def get_model_parallel_group(self) -> ProcessGroup:
        """Ranks that together hold one whole model."""
        return megatron_state.get_model_parallel_group()

    def get_model_parallel_rank(self) -> int:
        """Rank within :meth:`get_model_parallel_group`."""
        return distributed.get_rank(megatron_state.get_model_parallel_group())

    def get_model_parallel_world_size(self) -> int:
        """Size of :meth:`get_model_parallel_group`."""
        return distributed.get_world_size(megatron_state.get_model_parallel_group())

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Ranks that share each layer."""
        return megatron_state.get_tensor_model_parallel_group()

    def get_tensor_model_parallel_rank(self) -> int:
        """Rank within :meth:`get_tensor_model_parallel_group`."""
        return megatron_state.get_tensor_model_parallel_rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        """Size of :meth:`get_tensor_model_parallel_group`."""
        return megatron_state.get_tensor_model_parallel_world_size()

    def get_pipeline_model_parallel_rank(self) -> int:
        """This rank's stage."""
        return megatron_state.get_pipeline_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Number of stages."""
        return megatron_state.get_pipeline_model_parallel_world_size()


def fail_together(problem: str | None) -> None:
    """Raise on every rank if any rank has a problem, so that none waits for the others forever.

    Raises:
        UserError: the first problem, with its rank.
    """
    problems: list[str | None] = [None] * distributed.get_world_size()
    distributed.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found is not None:
            raise UserError(f"{found} (rank {rank})" if len(problems) > 1 else found)


@contextmanager
def process_groups(
    parallel: ParallelConfig, seed: int, timeout: timedelta = TIMEOUT
) -> Iterator[ParallelState]:
    """Start the process groups of a layout and end them cleanly.

    Under ``torchrun`` the ranks meet through its environment; without, this process is the only
    rank. NCCL where CUDA exists, one rank per GPU; gloo elsewhere. A default group that the
    caller has started is used and left to it.

    Args:
        parallel: the layout; its sizes must fill the ranks (``Recipe.data_parallel`` checks).
        seed: base of Megatron's model-parallel random states.
        timeout: how long a collective may wait.
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
                # Gloo groups beside NCCL's serve Megatron's own optimizer checkpoints only.
                create_gloo_process_groups=False,
            )
            model_parallel_cuda_manual_seed(seed)
            yield _current_state(device)
        finally:
            megatron_state.destroy_model_parallel()


@contextmanager
def _ending_new_groups() -> Iterator[None]:
    """End the groups that are made inside, whoever makes them.

    Megatron's ``destroy_model_parallel`` only drops its references to its forty groups: torch keeps
    them and their threads, fifty a layout with gloo, until the default group ends, and a network
    keeps the groups it was built with for as long as it waits in reference cycles for the
    collector.

    Meanwhile the collector leaves alone what was there before, most of it modules: DeepSpeed
    collects before and after each parameter group it takes, a quarter of a second each time.
    """
    known = set(_groups())
    gc.freeze()
    try:
        yield
    finally:
        for group in [each for each in _groups() if each not in known]:
            distributed.destroy_process_group(group)
        gc.collect()
        gc.unfreeze()


def _groups() -> list[ProcessGroup]:
    """Every process group this rank belongs to, in the order of their making; torch lists none."""
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
