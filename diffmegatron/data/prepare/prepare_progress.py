"""Progress line of ``diffmegatron prepare``: share of the input that is done, rates, time left."""

import itertools
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from diffmegatron.data.prepare.corpus_readers import CorpusFile
from diffmegatron.data.prepare.worker_pool import Position


class _Totals(Protocol):
    tokens: int
    text_bytes: int
    rejected: int


class PrepareProgress:
    """Context in which :meth:`update` redraws the progress line on standard error."""

    def __init__(self, files: list[CorpusFile], show: bool) -> None:
        sizes = [file.size for file in files]
        self._before = [0, *itertools.accumulate(sizes)]
        self._progress = Progress(
            TextColumn("prepare"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not show,
        )
        self._task = self._progress.add_task("prepare", total=max(1, self._before[-1]), rate="")
        self._started = time.monotonic()
        self._first: tuple[int, int] | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def update(self, place: Position, totals: _Totals) -> None:
        """Show the progress up to the input position ``place``.

        The rates (MB/s, tokens/s) are averages since this object was created. The totals of the
        first call are the work of earlier processes and do not count.
        """
        first_bytes, first_tokens = self._first = self._first or (totals.text_bytes, totals.tokens)
        seconds = max(1e-9, time.monotonic() - self._started)
        rate = (
            f"{(totals.text_bytes - first_bytes) / seconds / 1e6:.1f} MB/s  "
            f"{(totals.tokens - first_tokens) / seconds:,.0f} tokens/s  "
            f"{totals.rejected} rejected"
        )
        completed = self._before[place.file] + place.offset
        self._progress.update(self._task, completed=completed, rate=rate)
