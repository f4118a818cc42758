"""Processes of an evaluation: each scores a share of the items, and rank 0 writes the report.

An item is the smallest part of a suite that is scored, such as a question or a document.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch import distributed

from diffmegatron.errors import UserError
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch

_Any = TypeVar("_Any")

# Timeout of collectives. It is long because processes may finish their shares of the items at very
# different times.
_TIMEOUT = timedelta(days=1)
# Prefixes of the environment variables that a launcher sets.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Ranks:
    """The processes of an evaluation, which share a file system.

    Attributes:
        rank: rank of this process.
        count: number of processes.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """True for the process that writes shared files and prints progress."""
        return self.rank == 0

    def share(self, items: Sequence[_Any]) -> Sequence[_Any]:
        """Return the items that this process scores: every ``count``-th, from index ``rank`` on."""
        return items[self.rank :: self.count]

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the processes that a launcher has started, and yield their :class:`Ranks`.

    Without a launcher there is one process.

    Raises:
        UserError: the launcher's variables are not valid; a process does not join; or this machine
            has GPUs, but none for this process.
    """
    launch = read_launch()
    if launch.ranks == 1:
        yield Ranks()
        return
    with default_group(_TIMEOUT):
        yield Ranks(launch.rank, launch.ranks)


def export_targets(targets: Sequence[Target], ranks: Ranks) -> None:
    """Export every checkpoint among the targets (models to evaluate) to a Hugging Face folder.

    Rank 0 exports the checkpoints that have no export yet, and the other processes wait. An export
    compares the logits of the checkpoint and of the exported model in process groups of a single
    rank, so it runs in a new process outside the launcher's group. If there is only one process,
    this function does nothing, and a checkpoint is exported when it is first used.

    Raises:
        UserError: an export failed.
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
