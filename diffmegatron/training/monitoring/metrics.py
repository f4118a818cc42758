"""The numbers of a run: ``metrics.jsonl`` and TensorBoard events with the same names."""

import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from diffmegatron.errors import UserError
from diffmegatron.files import open_file, read_bytes, shown, write_durably
from diffmegatron.training.monitoring.records import Records, dispensable

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
# No small file: a line at every step of a run of a million steps.
_MAX_BYTES = 1 << 32

Entry = dict[str, float]
_LINE = TypeAdapter(dict[str, int | FiniteFloat])
_LINE_BEGINS = b'{"step": '


class MetricsWriter:
    """Appends to both. A resumed run continues them: what lies after its step is dropped.

    Nothing that goes wrong with either ends the run.

    Args:
        run_dir: of the run.
        last_step: entries of later steps are dropped; -1: all.
    """

    def __init__(self, run_dir: Path, last_step: int) -> None:
        self._path = run_dir / METRICS
        self._lines = Records(self._path)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{time.time_ns():019d}.{socket.gethostname()}.{os.getpid()}"
        board = run_dir / TENSORBOARD
        with dispensable(board):
            board.mkdir(exist_ok=True)
        self._board = Records(board / name)
        self._board.append(_framed(Event(wall_time=time.time(), file_version="brain.Event:2")))
        self.rewind(last_step)

    def rewind(self, last_step: int) -> None:
        """Drop what lies after a step that the run has rolled back to."""
        self._lines.drop(lambda line: not _is_kept(_parsed(line), last_step))
        with dispensable(self._path):
            _drop_after(self._path, last_step)
        start = SessionLog(status=SessionLog.START)
        self._board.append(
            _framed(Event(wall_time=time.time(), step=last_step + 1, session_log=start))
        )

    def close(self) -> None:
        """Say what could not be written."""
        self._lines.close()
        self._board.close()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step; those that are not finite are left out (JSON has none)."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        now = time.time()
        self._lines.append(_line({"step": step, "time": round(now, 3), **values}))
        summary = Summary(
            value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        )
        self._board.append(_framed(Event(wall_time=now, step=step, summary=summary)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[Entry]:
    """Every recorded entry of a run, oldest first; none if it has recorded nothing.

    An unfinished last line is passed over, and so are damaged ones, with a warning.

    Raises:
        UserError: there is something of that name that cannot be read.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    lines, _ = _read_lines(path)
    entries = [entry for line in lines if (entry := _parsed(line)) is not None]
    if len(entries) < len(lines):
        log.warning("%s has %d damaged lines", shown(path), len(lines) - len(entries))
    return entries


def newest_entries(run_dir: Path, max_bytes: int = 1 << 18) -> list[Entry]:
    """The last entries of a run, oldest first, however long it has been; damaged ones not.

    Args:
        run_dir: of the run.
        max_bytes: of the end of the file that is read, some hundred entries.

    Raises:
        UserError: there is something of that name that cannot be read.
    """
    path = run_dir / METRICS
    if not path.exists():
        return []
    with open_file(path, buffering=0) as stream:
        beginning = max(0, os.fstat(stream.fileno()).st_size - max_bytes)
        stream.seek(beginning)
        lines = stream.read(max_bytes).split(b"\n")[:-1]
    whole = lines[1:] if beginning else lines
    return [entry for line in whole if (entry := _parsed(line)) is not None]


def _drop_after(path: Path, last_step: int) -> None:
    """Leave the entries up to a step, and set aside a file that holds anything else.

    What lies after the step is cut off, which needs no space on the disk.

    Raises:
        OSError: the file cannot be changed.
    """
    if not os.path.lexists(path):
        return
    try:
        lines, unfinished = _read_lines(path)
    except UserError as error:
        log.warning("%s; it is kept as %s", error, shown(_set_aside(path)))
        return
    entries = [_parsed(line) for line in lines]
    kept = [line for line, each in zip(lines, entries, strict=True) if _is_kept(each, last_step)]
    content = b"".join(kept)
    # An entry after the step is damaged if one that is kept follows: a step has changed.
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
        "%s had %d damaged lines: it is kept as %s, and the run goes on with the %d whole ones",
        shown(path),
        damaged,
        shown(aside),
        len(kept),
    )


def _read_lines(path: Path) -> tuple[list[bytes], bytes]:
    """The whole lines of a file, and what is left of one that was not finished."""
    *lines, unfinished = read_bytes(path, max_bytes=_MAX_BYTES).split(b"\n")
    return [line + b"\n" for line in lines], unfinished


def _line(entry: Mapping[str, float]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _parsed(line: bytes) -> Entry | None:
    """The entry of a line; None: it is damaged."""
    try:
        entry = _LINE.validate_json(line, strict=True)
    except ValidationError:
        return None
    step = entry.get("step")
    return entry if isinstance(step, int) and step >= 0 else None


def _is_kept(entry: Entry | None, last_step: int) -> bool:
    return entry is not None and entry["step"] <= last_step


def _set_aside(path: Path) -> Path:
    """Give what has a name another that is free."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged_{number}")):
        number += 1
    return path.rename(aside)


def _framed(event: Event) -> bytes:
    """An event as a file of events holds it, with its length and checksums."""
    frame = io.BytesIO()
    RecordWriter(frame).write(event.SerializeToString())
    return frame.getvalue()
