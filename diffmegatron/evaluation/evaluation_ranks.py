"""The processes of an evaluation: each scores a share of the items, and rank 0 does the rest."""

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
from diffmegatron.files import shown
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.launcher import read_launch

_Any = TypeVar("_Any")

# Processes may finish their shares of the items at very different times.
_TIMEOUT = timedelta(days=1)
# Prefixes of the variables that a launcher sets.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Ranks:
    """Rank of this process and number of processes, which share a file system."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """True for the process that writes shared files and prints progress."""
        return self.rank == 0

    def share(self, items: Sequence[_Any]) -> Sequence[_Any]:
        """Return the items of this process."""
        return items[self.rank :: self.count]

    def meet(self) -> None:
        """Wait for all other processes."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes that a launcher has started; without a launcher there is one.

    Raises:
        UserError: a process does not arrive, or has no GPU.
    """
    launch = read_launch()
    if launch.ranks == 1:
        yield Ranks()
        return
    with default_group(_TIMEOUT):
        yield Ranks(launch.rank, launch.ranks)


def export_targets(targets: Sequence[Target], ranks: Ranks) -> None:
    """Export the checkpoints among the targets, once for all processes.

    The export compares logits in process groups of a single rank, so it runs in a new process.

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
                    f"the export of {shown(target.checkpoint)} failed with the error above; "
                    "correct it, or give a Hugging Face folder"
                )
    ranks.meet()
