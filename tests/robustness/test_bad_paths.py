"""Tests that a command with a bad path succeeds, or prints one sentence and changes no file."""

import errno
import json
import os

import pytest

from tests.paths import DOCS, RESULTS
from tests.robustness.bad_paths import KINDS, make_inputs, places, run, try_kind
from tests.robustness.count import TESTED


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_inputs(folder)
    return folder


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_bad_path_is_used_or_refused_with_a_one_line_error(
    place, made, corpus, tmp_path, monkeypatch
):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.chdir(tmp_path)
    for name in ("_KERNEL_SECONDS", "_PRODUCT_SECONDS", "_COPY_SECONDS"):
        monkeypatch.setattr(f"diffmegatron.tuning.tune.{name}", 0.0)
    problems = {
        kind.__name__: problem
        for kind in KINDS
        if (problem := try_kind(place, kind, tmp_path / kind.__name__, made, corpus))
    }
    assert not problems


def test_an_error_of_an_internal_file_keeps_its_traceback(monkeypatch, tmp_path):
    def fails(*_: object) -> None:
        (tmp_path / "of the program").read_text()

    monkeypatch.setattr("diffmegatron.doctor.print_examination", fails)
    status, _, _ = run(["doctor"])
    assert "FileNotFoundError" in str(status)
    status, _, err = run(["doctor", str(tmp_path)])
    assert status == 2 and "Got unexpected extra argument" in err


def test_a_full_disk_ends_a_command_with_status_69(monkeypatch, tmp_path):
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "full"))

    monkeypatch.setattr("diffmegatron.operations.recipes.copy", fails)
    status, _, err = run(["configs", "copy", "quickstart", str(tmp_path)])
    assert status == 69 and err == f"error: cannot use {tmp_path}/full: No space left on device\n"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("can't start new thread"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"),
    ],
    ids=repr,
)
def test_too_little_memory_ends_a_command_with_status_69(error, monkeypatch):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr("diffmegatron.doctor.print_examination", fails)
    status, _, err = run(["doctor"])
    assert status == 69 and "use a machine with more memory" in err and err.count("\n") == 1


def test_the_committed_counts_cover_every_place_and_kind():
    """Check that bad_paths.json and the pages have every place and kind, without a problem.

    After a change of the commands, write the file again with ``python -m tests.robustness.count``.
    """
    counts = json.loads((RESULTS / "bad_paths.json").read_text())
    number = len(list(places()))
    names = [kind.__name__.replace("_", " ") for kind in KINDS]
    assert {*counts} == {*names, *TESTED}
    assert all(counts[name]["tried"] == number for name in names)
    assert all(each["tried"] == each["held"] > 0 for each in counts.values())
    page = (RESULTS / "robustness.md").read_text()
    assert page.count(f"| {number} | {number} |") == len(names)
    for name, file in TESTED.items():
        tried = counts[name]["tried"]
        assert f"| `{file.removeprefix('tests/')}` | {tried} | {tried} |" in page
    words = " ".join((DOCS / "robustness.md").read_text().split())
    assert f"{number} places, {number * len(names):,} times" in words
