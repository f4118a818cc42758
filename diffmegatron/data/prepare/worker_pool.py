"""Encode batches of records in order, in this process or in worker processes."""

import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType

from diffmegatron.data.prepare.corpus_readers import CorpusFile, CorpusRecord, read_records
from diffmegatron.data.prepare.encode import EncodedBatch, encode_batch
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.errors import UserError

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024
# Batches queued per worker, so that no worker is idle while the oldest batch is unfinished.
_QUEUED_PER_WORKER = 3


# Open files of this process for a pool and for each of its workers, with a margin. If one cannot be
# opened, the pool can fail within the library or hang.
_POOL_FILES, _WORKER_FILES = 32, 4


@dataclass(frozen=True)
class CorpusPosition:
    """Position in the input of a preparation."""

    file: int = 0  # index of the current file
    records: int = 0  # number of records of this file that are done
    offset: int = 0  # approximate bytes of these records, for the progress line


def encode_in_order(
    files: list[CorpusFile],
    start: CorpusPosition,
    settings: PrepareSettings,
    workers: int,
) -> Iterator[tuple[CorpusPosition, EncodedBatch]]:
    """Encode the records after ``start``; yield each batch with the position after its records."""
    batches = _read_batches(files, start, settings.columns, settings.max_document_bytes)
    if workers == 1:
        for position, batch in batches:
            yield position, encode_batch(batch, settings)
        return
    _check_open_files(workers)
    with ProcessPoolExecutor(
        workers,
        # A forked worker would inherit locks of torch and of the progress line, without the threads
        # that release them.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
    ) as pool:
        queued: deque[tuple[CorpusPosition, Future[EncodedBatch]]] = deque()
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


def _check_open_files(workers: int) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = sum(1 for _ in Path("/dev/fd").iterdir()) + _POOL_FILES + _WORKER_FILES * workers
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UserError(
            f"--workers {workers} needs {needed} open files, but this process may open {limit}; "
            "raise the limit (ulimit -n), or give fewer workers"
        )


@contextmanager
def _delayed_interrupts() -> Iterator[None]:
    """Delay Ctrl-C (SIGINT) in this process, and block it in workers that start in the context.

    A terminal sends Ctrl-C to the workers too, but only this process should handle it.

    Blocking SIGINT in the main thread is not enough: if another thread receives the signal, Python
    still runs the handler in the main thread. A temporary handler therefore records the signal.
    """
    received: list[tuple[int, FrameType | None]] = []
    is_main = threading.current_thread() is threading.main_thread()
    # This handler must not raise: Python drops exceptions of a handler that runs in a finalizer.
    if is_main:
        handler = signal.signal(signal.SIGINT, lambda *call: received.append(call))
    try:
        # In CPython 3.11 and older, starting the resource tracker unblocks SIGINT; start it first.
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
    # Do nothing here that can fail: an exception would look like a killed worker.
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """End this worker when its parent has ended.

    The worker itself keeps the work queue open, so it would otherwise wait for work forever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _read_batches(
    files: list[CorpusFile], start: CorpusPosition, columns: tuple[str, ...], max_bytes: int
) -> Iterator[tuple[CorpusPosition, list[tuple[CorpusFile, CorpusRecord]]]]:
    records: list[tuple[CorpusFile, CorpusRecord]] = []
    position, size = start, 0
    for number in range(start.file, len(files)):
        file = files[number]
        used, offset = (start.records, start.offset) if number == start.file else (0, 0)
        for record in itertools.islice(read_records(file, columns, max_bytes), used, None):
            used += 1
            offset = min(offset + record.payload_bytes, file.size)
            position = CorpusPosition(number, used, offset)
            records.append((file, record))
            size += record.payload_bytes
            if size >= _BATCH_BYTES or len(records) >= _BATCH_RECORDS:
                yield position, records
                records, size = [], 0
    if records:
        yield position, records
