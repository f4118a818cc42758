"""Encode batches of records in order, in this process or in worker processes.

A worker process ends itself if one record takes too much CPU time, because nothing else can
interrupt the library of a tokenizer.
"""

import itertools
import multiprocessing
import os
import resource
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from diffmegatron.data.prepare.corpus_readers import CorpusFile, CorpusRecord, read_records
from diffmegatron.data.prepare.encode import EncodedBatch, encode_batch, loaded
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.errors import UserError

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024
# Batches queued per worker, so that no worker is idle while the oldest batch is unfinished.
_QUEUED_PER_WORKER = 3
# A forked worker would inherit locks of torch and of the progress line, without the threads that
# release them.
_SPAWN = multiprocessing.get_context("spawn")
# Open files of this process for a pool and for each of its workers, with a margin. If one cannot be
# opened, the pool can fail within the library or hang.
_POOL_FILES, _WORKER_FILES = 32, 4
# CPU seconds after which a record counts as endless. Tokenizers encode about 1 MB per second, and
# a chat template may take a minute.
_CPU_SECONDS, _CPU_SECONDS_PER_BYTE = 120.0, 1e-5

RecordBatch = list[tuple[CorpusFile, CorpusRecord]]


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
    if workers == 1 and not loaded(settings.tokenizer).can_hang:
        for position, batch in batches:
            yield position, encode_batch(batch, settings)
        return
    _check_open_files(workers)
    queue: deque[tuple[CorpusPosition, RecordBatch]] = deque()
    while not (yield from _encode_in_pool(batches, queue, settings, workers)):
        position, batch = queue.popleft()
        yield position, _encode_apart(batch, settings)


def _encode_in_pool(
    batches: Iterator[tuple[CorpusPosition, RecordBatch]],
    queue: deque[tuple[CorpusPosition, RecordBatch]],
    settings: PrepareSettings,
    workers: int,
) -> Generator[tuple[CorpusPosition, EncodedBatch], None, bool]:
    """Encode the batches in ``queue`` and all others, in order; return whether all are encoded.

    If a record takes too long, stop before the oldest batch that is not encoded. ``queue`` then
    begins with this batch.

    Raises:
        UserError: a worker process was killed.
    """
    futures: deque[Future[EncodedBatch]] = deque()
    children = set[BaseProcess]()

    def submit() -> None:
        with _delayed_interrupts():  # submit() may start a worker, which must block SIGINT.
            batch = queue[len(futures)][1]
            futures.append(pool.submit(_encode_limited, batch, settings, _CPU_SECONDS))
        children.update(multiprocessing.active_children())

    def oldest() -> tuple[CorpusPosition, EncodedBatch]:
        encoded = futures[0].result()
        futures.popleft()
        return queue.popleft()[0], encoded

    with ProcessPoolExecutor(workers, mp_context=_SPAWN, initializer=_start_worker) as pool:
        try:
            for _ in range(len(queue)):
                submit()
            for each in batches:
                queue.append(each)
                submit()
                if len(futures) >= _QUEUED_PER_WORKER * workers:
                    yield oldest()
            while futures:
                yield oldest()
            return True
        except BrokenProcessPool:
            pass
        finally:
            pool.shutdown(cancel_futures=True)
    if not any(child.exitcode == -signal.SIGPROF for child in children):
        raise UserError(
            f"one of the {workers} worker processes was killed (out of memory?); run the same "
            "command again to resume from the last commit"
        )
    return False


def _encode_apart(batch: RecordBatch, settings: PrepareSettings) -> EncodedBatch:
    """Encode a batch in a process of its own; records that end the process become rejects.

    Raises:
        UserError: the process ended for another reason than a record that takes too long.
    """
    endless: set[int] = set()
    while True:
        receiver, sender = _SPAWN.Pipe(duplex=False)
        arguments = (batch, settings, _CPU_SECONDS, sender, endless)
        process = _SPAWN.Process(target=_encode_and_send, args=arguments, daemon=True)
        with sender, _delayed_interrupts():
            process.start()
        number, received = -1, None
        with receiver, suppress(EOFError):
            while not isinstance(received := receiver.recv(), EncodedBatch):
                number = received
        process.join()
        if isinstance(received, EncodedBatch):
            return received
        if process.exitcode != -signal.SIGPROF:
            raise UserError(
                "one of the worker processes was killed (out of memory?); run the same command "
                "again to resume from the last commit"
            )
        endless.add(number)


def _encode_and_send(
    batch: RecordBatch,
    settings: PrepareSettings,
    cpu_seconds: float,
    sender: Connection,
    endless: Collection[int],
) -> None:
    """Encode a batch in a process of its own; send the numbers of its records and the result."""
    _start_worker()
    sender.send(_encode_limited(batch, settings, cpu_seconds, sender.send, endless))


def _encode_limited(
    batch: RecordBatch,
    settings: PrepareSettings,
    cpu_seconds: float,
    send: Callable[[int], None] | None = None,
    endless: Collection[int] = (),
) -> EncodedBatch:
    """Encode a batch in this worker process, which SIGPROF ends if a record takes too long.

    ``send`` is called with the number of each record that begins.
    """

    def begin(number: int, record: CorpusRecord) -> None:
        if send is not None:
            send(number)
        allowed = cpu_seconds + _CPU_SECONDS_PER_BYTE * record.payload_bytes
        signal.setitimer(signal.ITIMER_PROF, allowed)

    encoded = encode_batch(batch, settings, begin, endless)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return encoded


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
) -> Iterator[tuple[CorpusPosition, RecordBatch]]:
    records: RecordBatch = []
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
