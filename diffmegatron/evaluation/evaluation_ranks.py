"""The processes of one evaluation: each asks its share of the items, and rank 0 does all else."""

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

# The shares of the items may take as much longer than each other.
_PATIENCE = timedelta(days=1)
# What makes a process one of several.
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_")


@dataclass(frozen=True)
class Ranks:
    """This process and how many there are; they see the same files."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes what there is one of, and says how far it is."""
        return self.rank == 0

    def share(self, items: Sequence[_Any]) -> Sequence[_Any]:
        """What this process asks of them."""
        return items[self.rank :: self.count]

    def meet(self) -> None:
        """Wait for all others."""
        if self.count > 1:
            distributed.barrier()


@contextmanager
def joined() -> Iterator[Ranks]:
    """The processes that a launcher has started; one where there is none.

    Raises:
        UserError: they cannot meet, or there is no GPU for this one.
    """
    launch = read_launch()
    if launch.ranks == 1:
        yield Ranks()
        return
    with default_group(_PATIENCE):
        yield Ranks(launch.rank, launch.ranks)


def export_targets(targets: Sequence[Target], ranks: Ranks) -> None:
    """Export the checkpoints among the targets, once for all processes.

    The comparison of logits needs process groups of a single rank, and so a process of its own.

    Raises:
        UserError: one cannot be exported.
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
                    f"{shown(target.checkpoint)} was not exported, as is said above; correct that, "
                    "or give a Hugging Face folder"
                )
    ranks.meet()
