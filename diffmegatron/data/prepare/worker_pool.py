"""Encode batches of records in worker processes; the results keep the order of the records."""

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
from diffmegatron.data.prepare.encode import EncodedBatch, encode_batch
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.errors import UserError

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024
# Number of queued batches per worker. Results are yielded in order, so the other workers need more
# batches while the oldest batch is still being encoded.
_QUEUED_PER_WORKER = 3


@dataclass(frozen=True)
class Position:
    """Position in the input of a preparation.

    Attributes:
        file: index of the current file; all files before it are done.
        records: number of records of the current file that are done.
        offset: approximate number of bytes of these records, used only by the progress line.
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
    """Encode the records after ``start`` in batches, and yield each encoded batch.

    Each batch comes with the position in the input after its last record. At most about three
    batches per worker are in memory at a time.

    Args:
        workers: number of processes that tokenise; 1 uses this process.

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
        # A forked worker would inherit locks of torch and of the progress line, without the threads
        # that release them.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    ) as pool:
        queued: deque[tuple[Position, Future[EncodedBatch]]] = deque()
        try:
            for position, batch in batches:
                with _delayed_interrupts():  # submit() may start a worker, which must block SIGINT.
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
    """Delay Ctrl-C (SIGINT) in this process, and block it in workers that start in the context.

    For Ctrl-C, a terminal sends SIGINT to this process and to all workers. The workers inherit the
    blocked signal and never receive it, so this process ends them. In this process, SIGINT could
    interrupt the start of a worker. The worker would then receive incomplete start-up data and
    print a traceback.

    It is not enough to block the signal in the main thread: another thread may receive the signal,
    and Python then runs the handler in the main thread. A temporary handler therefore records the
    signal, and the original handler is called at the end.
    """
    received: list[tuple[int, FrameType | None]] = []
    is_main = threading.current_thread() is threading.main_thread()
    # The temporary handler must not raise an exception. Modules are imported in the context, and
    # Python drops an exception that a signal handler raises within a finalizer or a callback of the
    # import system. The Ctrl-C would then have no effect.
    if is_main:
        handler = signal.signal(signal.SIGINT, lambda *call: received.append(call))
    try:
        # Before CPython 3.12, the start of multiprocessing's resource tracker unblocks SIGINT. So
        # start it before SIGINT is blocked.
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
    # An exception in this initializer would be lost and look like a killed worker, so nothing that
    # can fail is done here.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Wait until the parent process has ended, and then end this worker process.

    A worker whose parent was killed would otherwise wait for work forever. The end of the parent
    does not close the queue of work, because the worker has the queue's writing end open too.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read_batches(
    files: list[CorpusFile], start: Position, columns: tuple[str, ...], max_bytes: int
) -> Iterator[tuple[Position, list[tuple[CorpusFile, Record]]]]:
    """Yield batches of records, each with the position in the input after its last record.

    A batch ends at 1 MiB or 1024 records, and may contain records of several files.
    """
    records: list[tuple[CorpusFile, Record]] = []
    size = 0
    for position, file, record in _records_after(files, start, columns, max_bytes):
        records.append((file, record))
        size += record.payload_bytes
        if size >= _BATCH_BYTES or len(records) >= _BATCH_RECORDS:
            yield position, records
            records, size = [], 0
    if records:
        yield position, records


def _records_after(
    files: list[CorpusFile], start: Position, columns: tuple[str, ...], max_bytes: int
) -> Iterator[tuple[Position, CorpusFile, Record]]:
    for number in range(start.file, len(files)):
        file = files[number]
        used = start.records if number == start.file else 0
        offset = start.offset if number == start.file else 0
        for record in itertools.islice(read_records(file, columns, max_bytes), used, None):
            used += 1
            offset = min(offset + record.payload_bytes, file.size)
            yield Position(number, used, offset), file, record
