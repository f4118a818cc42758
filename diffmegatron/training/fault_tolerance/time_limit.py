"""When Slurm ends the job of a run, although somebody may move that while the job runs."""

import time
from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.files import read_text

JOB_END = "job_end"
"""File in the directory of an attempt; the job script writes it again when the end is moved."""
_MAX_BYTES = 100
# A file server should not be asked at every step of milliseconds.
_READ_SECONDS = 10.0


class TimeLimit:
    """The end of a Slurm job.

    Args:
        at_start: of the job, in seconds since 1970; None: not known.
        folder: of the attempt, with the file that ``slurm.sh`` keeps up to date; None: no attempt.
    """

    def __init__(self, at_start: float | None, folder: Path | None) -> None:
        self._end, self._folder = at_start, folder
        self._next_reading = 0.0

    def is_within(self, seconds: float) -> bool:
        """Whether the job ends within so many seconds, or has reached its end."""
        self._read()
        return self._end is not None and time.time() > self._end - seconds

    def _read(self) -> None:
        """Read the present end; what cannot be read leaves the end that is known."""
        if self._folder is None or time.monotonic() < self._next_reading:
            return
        self._next_reading = time.monotonic() + _READ_SECONDS
        try:
            text = read_text(self._folder / JOB_END, max_bytes=_MAX_BYTES).strip()
        except UserError:
            return
        if text == "none":
            self._end = None
        elif text.isascii() and text.isdecimal():
            self._end = float(text)
