"""Tests that a run stops after a signal, and that the resumed run equals an undisturbed run."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.errors import UserError
from diffmegatron.operations.status import examine_run
from diffmegatron.training import trainer
from diffmegatron.training.monitoring import evaluators
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.saving import saver
from diffmegatron.training.trainer import train

SHORT = [
    "training.steps=12",
    "training.eval_interval=6",
    "training.eval_batches=2",
    "data.test_fraction=0.2",
]


def losses(run_dir: Path) -> list[tuple[str, float, float]]:
    """Return every loss in ``metrics.jsonl``: its name, its step and its value, sorted."""
    names = ("train/loss", "valid/loss", "test/loss")
    entries = read_metrics(run_dir)
    return sorted((name, e["step"], e[name]) for e in entries for name in names if name in e)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """Return the losses of an undisturbed run of 12 steps, evaluated at 0, 6 and 12."""
    from diffmegatron.config.load import load_recipe
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(TINY.format(run_dir=folder / "run", corpus=corpus))
    train(load_recipe(folder / "tiny.yaml", SHORT))
    found = losses(folder / "run")
    assert [step for name, step, _ in found if name == "valid/loss"] == [0, 6, 12]
    assert [step for name, step, _ in found if name == "test/loss"] == [12]
    return found


def signalling(function, call: int, number: int):
    """Return a wrapper of ``function`` that sends a signal to this process in one of its calls.

    Args:
        function: function to wrap.
        call: number of the call in which the signal is sent, before ``function`` runs; the first
            call is 1.
        number: number of the signal.
    """
    count = [0]

    def wrapper(*arguments, **options):
        count[0] += 1
        if count[0] == call:
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    return wrapper


@pytest.mark.parametrize(
    ("module", "name", "call", "stops_at", "left", "number"),
    [
        # Each of the three signals arrives in the first step, which may compile.
        (trainer, "forward_backward", 1, 1, "", signal.SIGTERM),
        (trainer, "forward_backward", 1, 1, "", signal.SIGUSR1),
        (trainer, "forward_backward", 1, 1, "", signal.SIGINT),
        (trainer, "forward_backward", 5, 5, "", signal.SIGTERM),
        (saver, "write_pieces", 1, 11, "", signal.SIGTERM),  # the save of step 10
        # The signal arrives in a step before an evaluation, or in an evaluation. An evaluation
        # needs two batches for each loss.
        (evaluators, "forward_only", 1, 0, "valid/loss", signal.SIGTERM),
        (trainer, "forward_backward", 6, 6, "valid/loss", signal.SIGTERM),
        (evaluators, "forward_only", 3, 6, "valid/loss", signal.SIGTERM),
        (trainer, "forward_backward", 12, 12, "valid/loss, test/loss", signal.SIGTERM),
        (evaluators, "forward_only", 5, 12, "valid/loss, test/loss", signal.SIGTERM),
        (evaluators, "forward_only", 6, 12, "test/loss", signal.SIGTERM),
        (evaluators, "forward_only", 7, 12, "test/loss", signal.SIGTERM),
    ],
)
def test_a_stopped_run_saves_and_resumes_exactly(
    module, name, call, stops_at, left, number, tiny_recipe, monkeypatch, undisturbed, capfd
):
    handlers = signal.getsignal(number)
    recipe = tiny_recipe(*SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, signalling(getattr(module, name), call, number))
        assert not train(recipe), "train must return False for an unfinished run"
    assert signal.getsignal(number) is handlers, "train must restore the signal handlers"
    assert CheckpointStore(Path(recipe.run_dir)).steps()[-1] == stops_at
    said = f"saved step {stops_at}; the same command resumes from it"
    assert f"{said}{f', first with {left}' if left else ''}\n" in capfd.readouterr().out
    assert train(recipe)
    assert losses(Path(recipe.run_dir)) == undisturbed


def test_a_run_finishes_despite_a_stop_signal_in_its_last_evaluation_batch(
    tiny_recipe, monkeypatch, undisturbed
):
    recipe = tiny_recipe(*SHORT)
    with monkeypatch.context() as patch:
        # Call 8 is the last batch of the last evaluation.
        last = signalling(evaluators.forward_only, 8, signal.SIGTERM)
        patch.setattr(evaluators, "forward_only", last)
        assert train(recipe)
    assert losses(Path(recipe.run_dir)) == undisturbed


def test_the_last_evaluation_resumes_after_each_stop_signal(
    tiny_recipe, monkeypatch, undisturbed, capfd
):
    """Check a run whose last evaluation is stopped twice in valid/loss and then in test/loss."""
    recipe = tiny_recipe(*SHORT)
    # Each start is stopped in the evaluation batch with this number, counted from 1 in the start.
    for call in (5, 1, 3):
        with monkeypatch.context() as patch:
            stopped = signalling(evaluators.forward_only, call, signal.SIGTERM)
            patch.setattr(evaluators, "forward_only", stopped)
            assert not train(recipe)
        stopped_at = examine_run(Path(recipe.run_dir))
        left = "test/loss" if call == 3 else "valid/loss, test/loss"
        assert f"unfinished, because {left} of the last step are not recorded" in stopped_at.state
        assert stopped_at.exit_status == 1
    assert "first with test/loss\n" in capfd.readouterr().out
    assert train(recipe)
    assert losses(Path(recipe.run_dir)) == undisturbed
    assert examine_run(Path(recipe.run_dir)).state == "finished"


def test_a_non_finite_test_loss_after_a_restart_ends_the_run(tiny_recipe, monkeypatch):
    recipe = tiny_recipe(*SHORT)
    with monkeypatch.context() as patch:
        stopped = signalling(evaluators.forward_only, 5, signal.SIGTERM)
        patch.setattr(evaluators, "forward_only", stopped)
        assert not train(recipe)
    original = evaluators.forward_only
    broken = lambda *each: replace(original(*each), total=torch.tensor(torch.nan))  # noqa: E731
    monkeypatch.setattr(evaluators, "forward_only", broken)
    with pytest.raises(UserError, match="test loss is inf"):
        train(recipe)


def test_a_run_stops_before_the_end_of_its_slurm_job(tiny_recipe, monkeypatch, undisturbed):
    recipe = tiny_recipe(*SHORT, "checkpoint.time_limit_margin=100")
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 99))
        assert not train(recipe)
        assert CheckpointStore(Path(recipe.run_dir)).steps() == [0]
        said = "stopped .*/run twice at step 0 before valid/loss, without .*_margin 100"
        with pytest.raises(UserError, match=said):
            train(recipe)
    assert train(recipe)
    assert losses(Path(recipe.run_dir)) == undisturbed
