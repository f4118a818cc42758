"""Every command with every kind of bad path: a result or one sentence, never half of an output."""

import errno
import json
import os

import pytest

from tests.paths import RESULTS
from tests.robustness.bad_paths import KINDS, make_inputs, places, run, try_kind


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_inputs(folder)
    return folder


@pytest.mark.parametrize("place", places(), ids=str)
def test_a_bad_path_is_used_or_refused_in_a_sentence(place, made, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.chdir(tmp_path)
    problems = {
        kind.__name__: problem
        for kind in KINDS
        if (problem := try_kind(place, kind, tmp_path / kind.__name__, made, corpus))
    }
    assert not problems


def test_an_error_of_a_file_that_nobody_named_keeps_its_traceback(monkeypatch, tmp_path):
    def fails(*_: object) -> None:
        (tmp_path / "of the program").read_text()

    monkeypatch.setattr("diffmegatron.doctor.run", fails)
    status, _, _ = run(["doctor"])
    assert "FileNotFoundError" in str(status)
    status, _, err = run(["doctor", str(tmp_path)])
    assert status == 2 and "Got unexpected extra argument" in err


def test_a_full_disk_may_have_space_later(monkeypatch, tmp_path):
    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "full"))

    monkeypatch.setattr("diffmegatron.operations.recipes.copy", fails)
    status, _, err = run(["configs", "copy", "quickstart", str(tmp_path)])
    assert status == 69 and err == f"error: cannot use {tmp_path}/full: No space left on device\n"


def test_the_committed_counts_are_of_every_place_and_kind():
    """``tests/robustness/count.py`` is to be run again when a command has been added."""
    counts = json.loads((RESULTS / "bad_paths.json").read_text())
    number = len(list(places()))
    assert counts == {
        kind.__name__.replace("_", " "): {"tried": number, "held": number} for kind in KINDS
    }
