"""Encode batches of records in worker processes, in the order of the records."""

import itertools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from types import FrameType

from diffmegatron.data.prepare.corpus_readers import CorpusFile, Record, read_records
from diffmegatron.data.prepare.encode import Batch, EncodedBatch, encode_batch
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.errors import UserError

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024
# Enough queued batches to keep every worker busy while the slowest batch finishes.
_QUEUED_PER_WORKER = 3


@dataclass(frozen=True)
class Position:
    """Progress within a corpus: ``records`` of file number ``file`` and all files before it.

    ``offset`` is the approximate number of bytes of these records; only the progress line uses it.
    """

    file: int = 0
    records: int = 0
    offset: int = 0


def encode_in_order(
    files: list[CorpusFile],
    start: Position,
    settings: PrepareSettings,
    workers: int,
) -> Iterator[tuple[Position, EncodedBatch]]:
    """Encode the records after ``start``; yield each batch with the position after it.

    The number of batches in memory is bounded, independent of the size of the corpus.

    Raises:
        UserError: a file cannot be read to its end or has changed, or a worker process was killed.
    """
    batches = _read_batches(files, start, settings.columns, settings.max_document_bytes)
    if workers == 1:
        for position, batch in batches:
            yield position, encode_batch(batch, settings)
        return
    with ProcessPoolExecutor(
        workers,
        # A forked worker would inherit threads and locks of torch and of the progress line.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    ) as pool:
        queued: deque[tuple[Position, Future[EncodedBatch]]] = deque()
        try:
            for position, batch in batches:
                with _delayed_interrupts():  # The first submissions start the processes.
                    future = pool.submit(encode_batch, batch, settings)
                queued.append((position, future))
                if len(queued) >= _QUEUED_PER_WORKER * workers:
                    done, future = queued.popleft()
                    yield done, future.result()
            while queued:
                done, future = queued.popleft()
                yield done, future.result()
        except BrokenProcessPool:
            raise UserError(
                f"one of the {workers} worker processes was killed (out of memory?); run the same "
                "command again to resume from the last commit"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, which a terminal sends to all of its processes, while workers are started.

    Workers inherit the blocked signal and never see it; this process ends them itself. It handles
    the signal after the block, because a worker that is half started would print that its input has
    ended. Blocking alone does not delay the signal here: another thread may receive it, and Python
    then runs the handler in the main thread.
    """
    received: list[tuple[int, FrameType | None]] = []
    is_main = threading.current_thread() is threading.main_thread()
    # This handler raises nothing: Python drops an exception that a signal raises within a finalizer
    # or a callback of the import system, and imports happen here.
    if is_main:
        handler = signal.signal(signal.SIGINT, lambda *call: received.append(call))
    try:
        # Starting the tracker unblocks the signal (CPython before 3.12), so start it beforehand.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
    finally:
        if is_main:
            signal.signal(signal.SIGINT, handler)
            if received and callable(handler):
                handler(*received[0])


def _start_worker() -> None:
    # An exception in an initializer is lost and looks like a killed worker, so nothing here may
    # fail.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker with its parent; it would otherwise wait forever on its own open queue."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read_batches(
    files: list[CorpusFile], start: Position, columns: tuple[str, ...], max_bytes: int
) -> Iterator[tuple[Position, Batch]]:
    """Yield batches of about one MiB, which may span several files."""
    records: list[tuple[CorpusFile, Record]] = []
    size = 0
    for position, file, record in _records_after(files, start, columns, max_bytes):
        records.append((file, record))
        size += _payload_size(record)
        if size >= _BATCH_BYTES or len(records) >= _BATCH_RECORDS:
            yield position, Batch(records)
            records, size = [], 0
    if records:
        yield position, Batch(records)


def _records_after(
    files: list[CorpusFile], start: Position, columns: tuple[str, ...], max_bytes: int
) -> Iterator[tuple[Position, CorpusFile, Record]]:
    for number in range(start.file, len(files)):
        file = files[number]
        used = start.records if number == start.file else 0
        offset = start.offset if number == start.file else 0
        for record in itertools.islice(read_records(file, columns, max_bytes), used, None):
            used += 1
            offset = min(offset + _payload_size(record), file.size)
            yield Position(number, used, offset), file, record


def _payload_size(record: Record) -> int:
    if isinstance(record.payload, bytes):
        return len(record.payload)
    return sum(len(value) for value in record.payload.values() if isinstance(value, bytes))
