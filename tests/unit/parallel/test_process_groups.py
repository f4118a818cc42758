"""The threads of process groups end, even if a Python object still refers to the groups."""

from pathlib import Path

from torch import distributed

from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.parallel.parallel_state import process_groups


class Network:
    """An object that refers to itself and to every group, as a network and its engine do."""

    def __init__(self) -> None:
        self.cycle = self
        self.groups = list(distributed.distributed_c10d._world.pg_map)


def threads_after_a_layout() -> int:
    with process_groups(ParallelConfig(), seed=1):
        network = Network()
    assert len(network.groups) > 10
    return len(list(Path("/proc/self/task").iterdir()))


def test_a_new_layout_ends_the_threads_of_dropped_networks():
    threads_after_a_layout()
    once = threads_after_a_layout()
    assert max(threads_after_a_layout() for _ in range(3)) <= once + 5
