"""Tests that ``prepare``, killed at any moment and run again, writes the same bytes."""

import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from diffmegatron.data.index.corpus_manifest import CorpusManifest, read_corpus_manifest
from diffmegatron.data.prepare import worker_pool as pool
from diffmegatron.data.prepare.parts import Part, merge
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from tests.paths import ROOT

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.forks.preloaded"])

KILLS = 30


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write files with damaged lines, duplicates and empty documents, and return their folder."""
    folder = tmp_path_factory.mktemp("corpus")
    pick = random.Random(0)
    for name in "abc":
        with (folder / f"{name}.jsonl").open("w") as file:
            for number in range(500):
                text = " ".join(pick.choices(["alpha", "beta", "数学", "\n"], k=pick.randrange(60)))
                line = json.dumps({"text": text})
                file.write((line[:-2] if number % 41 == 0 else line) + "\n")
    return folder


def run(corpus: Path, prefix: Path, workers: int = 1, batch_records: int = 17) -> CorpusManifest:
    # Small batches mean many commits, so that a kill can happen at many commits.
    pool._BATCH_RECORDS = batch_records
    return prepare(
        [corpus],
        prefix,
        "bytes",
        workers=workers,
        deduplicate=True,
        commit_seconds=0,
        show_progress=False,
    )


def outputs(prefix: Path) -> dict[str, bytes]:
    return {
        path.suffix: path.read_bytes()
        for path in prefix.parent.glob("out.*")
        if path.is_file() and path.suffix != ".lock"  # A kill leaves an unlocked file.
    }


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    prefix = tmp_path_factory.mktemp("undisturbed") / "out"
    manifest = run(corpus, prefix)
    assert manifest.rejected and manifest.empty and manifest.duplicates
    files = outputs(prefix)
    assert set(files) == {".bin", ".idx", ".json", ".jsonl"}
    return files


def start(corpus: Path, prefix: Path, workers: int = 1) -> BaseProcess:
    process = CONTEXT.Process(target=run, args=(corpus, prefix, workers))
    process.start()
    return process


def seconds_of(corpus: Path, prefix: Path) -> float:
    started = time.monotonic()
    start(corpus, prefix).join()
    return time.monotonic() - started


def kill(process: BaseProcess) -> bool:
    """Kill a process, and return whether it was still running."""
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def test_kills_at_random_moments_do_not_change_the_output(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    # The first starts the fork server, and the next copy its memory, which takes much longer.
    whole = min(seconds_of(corpus, tmp_path / f"timed{number}" / "out") for number in range(5))

    seed = time.time_ns()
    print(f"moments of the kills: random.Random({seed})")
    pick, kills, rounds = random.Random(seed), 0, 0
    while kills < KILLS:
        prefix = tmp_path / f"round{rounds}" / "out"
        rounds += 1
        for _ in range(KILLS):
            process = start(corpus, prefix)
            process.join(pick.uniform(0, 0.7 * whole))
            if not kill(process):
                break
            kills += 1
        run(corpus, prefix)
        assert outputs(prefix) == undisturbed
        assert not prefix.with_suffix(".partial").exists()


def test_killed_parts_resume_and_merge_into_the_whole_corpus(corpus: Path, tmp_path: Path) -> None:
    seed = time.time_ns()
    print(f"moments of the kills: random.Random({seed})")
    pick, parts = random.Random(seed), [Part(1, 2), Part(2, 2)]
    for part in parts:
        for _ in range(4):
            process = CONTEXT.Process(target=run_part, args=(corpus, tmp_path / "out", part))
            process.start()
            process.join(pick.uniform(0, 0.5))
            kill(process)
        run_part(corpus, tmp_path / "out", part)
    run_part(corpus, tmp_path / "whole", None)
    merged = merge(tmp_path / "out", show_progress=False)
    assert merged.content == read_corpus_manifest(tmp_path / "whole").content


def run_part(corpus: Path, prefix: Path, part: Part | None) -> None:
    pool._BATCH_RECORDS = 17
    prepare([corpus], prefix, "bytes", part=part, commit_seconds=0, show_progress=False)


def test_a_crash_before_a_sync_rename_or_deletion_loses_nothing(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """Check that a run after a crash writes the same bytes as an undisturbed run.

    The operations are syncs, renames and deletions. There is one crash before each of the first ten
    and of the last 30 operations. The last operations publish the output.
    """
    counted = tmp_path / "counted" / "out"
    process = CONTEXT.Process(target=run_and_crash, args=(corpus, counted, None))
    process.start()
    process.join()
    total = int((tmp_path / "operations").read_text())
    for number in (*range(10), *range(total - 30, total)):
        prefix = tmp_path / f"crash{number}" / "out"
        process = CONTEXT.Process(target=run_and_crash, args=(corpus, prefix, number))
        process.start()
        process.join()
        assert process.exitcode == 7, f"did not reach operation {number}"
        complete = prefix.with_suffix(".json").exists()
        assert not complete or outputs(prefix) == undisturbed, "the manifest must be written last"
        run(corpus, prefix, batch_records=350)
        assert outputs(prefix) == undisturbed, f"after a crash before operation {number}"


def run_and_crash(corpus: Path, prefix: Path, number: int | None) -> None:
    """Prepare, but exit before operation ``number`` (from 0): a sync, rename or deletion.

    If ``number`` is None, do not exit early. At the end, write the number of operations to the file
    ``operations``.
    """
    done = 0

    def crashing(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal done
            if done == number:
                os._exit(7)
            done += 1
            return call(*args, **options)

        return wrapper

    os.fsync = crashing(os.fsync)
    for name in ("replace", "unlink", "rmdir"):
        setattr(Path, name, crashing(getattr(Path, name)))
    run(corpus, prefix, batch_records=350)
    (prefix.parent.parent / "operations").write_text(str(done))


def test_a_killed_worker_is_an_error_and_the_next_run_completes(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pool, "_encode_limited", die)
        with pytest.raises(UserError, match="one of the 2 worker processes was killed"):
            run(corpus, tmp_path / "out", workers=2)
    run(corpus, tmp_path / "out", workers=2)
    assert outputs(tmp_path / "out") == undisturbed


def test_concurrent_prepare_runs_do_not_corrupt_the_output(
    corpus: Path, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    prefix, results = tmp_path / "out", CONTEXT.Queue()
    both = [CONTEXT.Process(target=run_and_tell, args=(corpus, prefix, results)) for _ in "ab"]
    for process in both:
        process.start()
    said = sorted(results.get(timeout=600) for _ in both)
    for process in both:
        process.join()
    assert said[0] == "done"
    assert said[1] == "done" or re.search(r"process \d+ on .* uses --output .*out; wait", said[1])
    assert outputs(prefix) == undisturbed
    assert not list(tmp_path.glob("out.[lp]*"))


def run_and_tell(corpus: Path, prefix: Path, results: Any) -> None:
    try:
        run(corpus, prefix)
        results.put("done")
    except UserError as error:
        results.put(f"refused: {error}")


def die(*_: object) -> None:
    os._exit(9)


def test_workers_end_with_their_killed_parent(corpus: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out"
    process = start(corpus, prefix, workers=2)
    while not (workers := children(process.pid)) or not prefix.with_suffix(".partial").exists():
        time.sleep(0.02)
    kill(process)
    deadline = time.monotonic() + 100
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, f"worker processes {workers} outlive their parent"
        time.sleep(0.02)


def children(parent: int | None) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def test_an_interrupt_in_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a SIGINT in a finalizer while a worker starts still raises KeyboardInterrupt.

    Python drops exceptions in finalizers, so the signal is handled after the start of the worker.
    """

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(pool.resource_tracker, "ensure_running", Finalized)
    with pytest.raises(KeyboardInterrupt), pool._delayed_interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_ends_prepare_without_a_traceback(tmp_path: Path) -> None:
    """Check that no process prints a traceback after Ctrl-C, not even a worker that is starting."""
    (tmp_path / "large.jsonl").write_text((json.dumps({"text": "word " * 2000}) + "\n") * 5000)
    words = ["prepare", "large.jsonl", "--output", "out", "--tokenizer", "bytes", "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "diffmegatron", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not children(process.pid) and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        # Send the signal again: Python drops an exception that a signal raises in a finalizer.
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=600)
    assert process.returncode in (1, 130), said
    assert "Traceback" not in said
