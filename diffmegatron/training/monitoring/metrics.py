"""Metrics of a run, written to ``metrics.jsonl`` and to TensorBoard with equal names and values.

A line of ``metrics.jsonl`` is an entry: ``{"step": 10, "time": SECONDS_SINCE_1970, NAME: VALUE}``.
"""

import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, open_file, read_bytes, write_durably
from diffmegatron.training.monitoring.records import MetricRecords, log_write_errors

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_MAX_BYTES = 1 << 32  # Enough for one line per step over a million steps.
_NEWEST_BYTES = 1 << 18

Entry = dict[str, float]
_LINE = TypeAdapter(dict[str, int | FiniteFloat])
_LINE_BEGINS = b'{"step": '


class MetricsWriter:
    """Writer that appends metrics to ``metrics.jsonl`` and to TensorBoard's event files.

    Write errors are logged and do not end the run. The constructor drops entries of steps after
    ``last_step``; -1 drops all entries.
    """

    def __init__(self, run_dir: Path, last_step: int) -> None:
        self._path = run_dir / METRICS
        self._lines = MetricRecords(self._path)
        self._events = _TensorBoardEvents(run_dir / TENSORBOARD)
        self.rewind(last_step)

    def rewind(self, last_step: int) -> None:
        """Drop the entries of steps after ``last_step``, the step from which the run resumes."""
        self._lines.drop(lambda line: not _is_kept(_parsed(line), last_step))
        with log_write_errors(self._path):
            _drop_after(self._path, last_step)
        self._events.restart(last_step + 1)

    def close(self) -> None:
        """Write pending values and close the files; log how many lines could not be written."""
        self._lines.close()
        self._events.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics of a step; leave out NaN and infinity, which JSON does not have."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        now = time.time()
        entry = {"step": step, "time": round(now, 3), **values}
        self._lines.append(json.dumps(entry).encode() + b"\n")
        self._events.write(step, now, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _TensorBoardEvents:
    """Writer of TensorBoard's event files.

    TensorBoard's own ``SummaryWriter`` writes in a thread, which ends with a traceback at the first
    error.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records: MetricRecords | None = None

    def restart(self, first_step: int) -> None:
        """Open a new event file.

        TensorBoard then hides the events of older files from step ``first_step`` on.
        """
        # The import takes a third of a second, and code that only reads metrics does not need it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self.close()
        with log_write_errors(self._folder):
            self._folder.mkdir(exist_ok=True)
        now = time.time_ns()
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{now:019d}.{socket.gethostname()}.{os.getpid()}"
        self._records = MetricRecords(self._folder / name)
        start = SessionLog(status=SessionLog.START)
        self._append(Event(wall_time=now / 1e9, step=first_step, file_version="brain.Event:2"))
        self._append(Event(wall_time=now / 1e9, step=first_step, session_log=start))

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Write metrics of a step; ``seconds`` is the time since 1970."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._append(Event(wall_time=seconds, step=step, summary=Summary(value=found)))

    def _append(self, event: "Event") -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        assert self._records is not None
        framed = io.BytesIO()
        RecordWriter(framed).write(event.SerializeToString())
        self._records.append(framed.getvalue())

    def close(self) -> None:
        """Write pending events; log how many events could not be written."""
        if self._records is not None:
            self._records.close()
            self._records = None


def read_metrics(run_dir: Path) -> list[Entry]:
    """Return all entries of ``metrics.jsonl``, oldest first; an empty list without the file.

    Damaged lines are ignored with a warning in the log.

    Raises:
        UserError: If ``metrics.jsonl`` exists and cannot be read.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    lines, _ = _read_lines(path)
    entries = [entry for line in lines if (entry := _parsed(line)) is not None]
    if len(entries) < len(lines):
        log.warning("%s has %d damaged lines", format_path(path), len(lines) - len(entries))
    return entries


def newest_entries(run_dir: Path) -> list[Entry]:
    """Return the entries in the last 256 KiB of ``metrics.jsonl``, oldest first.

    Damaged lines are ignored. The result is empty without the file.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    with open_file(path, buffering=0) as stream:
        beginning = max(0, os.fstat(stream.fileno()).st_size - _NEWEST_BYTES)
        stream.seek(beginning)
        lines = stream.read(_NEWEST_BYTES).split(b"\n")[:-1]
    whole = lines[1:] if beginning else lines
    return [entry for line in whole if (entry := _parsed(line)) is not None]


def _drop_after(path: Path, last_step: int) -> None:
    """Drop the entries after ``last_step`` from a file of metrics.

    An intact file is truncated, which needs no free space on the disk. A file with damaged lines is
    renamed, and the kept entries are written to a new file. An unreadable file is only renamed.
    """
    if not os.path.lexists(path):
        return
    try:
        lines, unfinished = _read_lines(path)
    except UserError as error:
        log.warning("%s; it is kept as %s", error, format_path(_set_aside(path)))
        return
    entries = [_parsed(line) for line in lines]
    kept = [line for line, each in zip(lines, entries, strict=True) if _is_kept(each, last_step)]
    content = b"".join(kept)
    # Steps never decrease in an intact file. A dropped line before the last kept line is therefore
    # damaged.
    end = max((n for n, each in enumerate(entries, 1) if _is_kept(each, last_step)), default=0)
    damaged = sum(each is None for each in entries[end:]) + end - len(kept)
    damaged += not _LINE_BEGINS.startswith(unfinished[: len(_LINE_BEGINS)])
    if not damaged:
        os.truncate(path, len(content))
        return
    repaired = path.with_name(f"{path.name}.repaired")
    write_durably(repaired, content)
    aside = _set_aside(path)
    repaired.rename(path)
    log.warning(
        "%s had %d damaged lines: it is kept as %s, and the run continues with the %d whole ones",
        format_path(path),
        damaged,
        format_path(aside),
        len(kept),
    )


def _read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """Return the complete lines of a file, and the bytes after the last newline."""
    *lines, unfinished = read_bytes(path, max_bytes=_MAX_BYTES).split(b"\n")
    return [line + b"\n" for line in lines], unfinished


def _parsed(line: bytes) -> Entry | None:
    try:
        entry = _LINE.validate_json(line, strict=True)
    except ValidationError:
        return None
    step = entry.get("step")
    return entry if isinstance(step, int) and step >= 0 else None


def _is_kept(entry: Entry | None, last_step: int) -> bool:
    return entry is not None and entry["step"] <= last_step


def _set_aside(path: Path) -> Path:
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged_{number}")):
        number += 1
    return path.rename(aside)
