"""What a launcher (torchrun, srun) tells a process about the ranks, before they meet."""

import os

from diffmegatron.errors import UserError

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_rank() -> int:
    """This process's rank as the launcher announced it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks of this run as the launcher announced them; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_launcher() -> None:
    """Refuse an environment that speaks of several ranks but does not let them meet.

    Raises:
        UserError: ``RANK`` or ``WORLD_SIZE`` is set and something that belongs to it is not, or
            they are no numbers that fit.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        present = [name for name in _RENDEZVOUS if name in os.environ]
        raise UserError(
            f"the environment sets {' and '.join(present)} but not {' and '.join(missing)}; start "
            "the ranks with torchrun or launch/slurm.sh, or unset the former to use one process"
        )
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and ranks.isdecimal() and int(rank) < int(ranks)):
        raise UserError(
            f"the environment sets RANK {rank!r} and WORLD_SIZE {ranks!r}; RANK counts from 0 up "
            "to WORLD_SIZE - 1"
        )
