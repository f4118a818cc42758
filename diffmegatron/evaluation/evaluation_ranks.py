"""Processes of an evaluation: each scores a share of the items, and rank 0 writes the report."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

from torch import distributed

from diffmegatron.errors import UserError
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch

# Processes may finish their shares of the items at very different times.
_TIMEOUT = timedelta(days=1)
# Prefixes of the environment variables that a launcher sets.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of processes of an evaluation; they share a file system."""

    rank: int
    count: int

    @property
    def is_main(self) -> bool:
        """True for the process that writes shared files and prints progress."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the processes that a launcher has started, if any, and yield their :class:`Ranks`."""
    launch = read_launch()
    with default_group(_TIMEOUT) if launch.ranks > 1 else nullcontext():
        yield Ranks(launch.rank, launch.ranks)


def export_targets(targets: Sequence[Target], ranks: Ranks) -> None:
    """Export every checkpoint among the targets to a Hugging Face folder, on rank 0.

    An export needs process groups of a single rank, so it runs in a new process outside the
    launcher's group. A single process exports a checkpoint only when it is first used.
    """
    if ranks.count == 1:
        return
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)
    }
    for target in targets if ranks.is_main else ():
        if target.checkpoint is not None and not target.export.exists():
            command = ["-m", "diffmegatron", "export", str(target.checkpoint), str(target.export)]
            export = subprocess.run([sys.executable, *command], env=environment, check=False)
            if export.returncode:
                raise UserError(
                    f"the export of {format_path(target.checkpoint)} failed with the error above; "
                    "correct it, or give a Hugging Face folder"
                )
    ranks.barrier()
