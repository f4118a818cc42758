"""Asked to stop at any moment, a run saves, ends, and goes on as if it had not been."""

import os
import signal
import time
from pathlib import Path

import pytest

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.training import trainer
from diffmegatron.training.monitoring import evaluators
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.saving import saver
from diffmegatron.training.trainer import train

SHORT = ["training.steps=12", "training.eval_interval=6", "training.eval_batches=2"]


def losses(run_dir: Path) -> list[tuple[float, float]]:
    return [(e["step"], e["train/loss"]) for e in read_metrics(run_dir) if "train/loss" in e]


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """The losses of the run that nobody stopped."""
    from diffmegatron.config.load import load_recipe
    from tests.conftest import TINY

    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "tiny.yaml").write_text(TINY.format(run_dir=folder / "run", corpus=corpus))
    train(load_recipe(folder / "tiny.yaml", SHORT))
    return losses(folder / "run")


def signalling(function, call: int, number: int):
    """``function``, with a signal to this process during its ``call``-th call (from 1)."""
    count = [0]

    def wrapper(*arguments, **options):
        count[0] += 1
        if count[0] == call:
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    return wrapper


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
@pytest.mark.parametrize(
    ("module", "name", "call", "stops_at"),
    [
        (trainer, "forward_backward", 1, 1),  # the first step, which may compile
        (trainer, "forward_backward", 5, 5),
        (evaluators, "forward_only", 3, 6),  # the evaluation after step 6
        (saver, "write_pieces", 1, 11),  # the save of step 10
    ],
)
def test_stopped_saved_and_resumed(
    module, name, call, stops_at, number, tiny_recipe, monkeypatch, undisturbed
):
    handlers = signal.getsignal(number)
    recipe = tiny_recipe(*SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(module, name, signalling(getattr(module, name), call, number))
        assert not train(recipe), "it says that it is not finished"
    assert signal.getsignal(number) is handlers, "handlers are as they were"
    assert CheckpointStore(Path(recipe.run_dir)).steps()[-1] == stops_at
    assert train(recipe)
    assert losses(Path(recipe.run_dir)) == undisturbed


def test_stops_in_time_before_the_end_of_a_slurm_job(tiny_recipe, monkeypatch, undisturbed):
    recipe = tiny_recipe(*SHORT, "checkpoint.time_limit_margin=100")
    with monkeypatch.context() as patch:
        patch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 99))
        assert not train(recipe)
    assert CheckpointStore(Path(recipe.run_dir)).steps() == [0]
    assert train(recipe)
    assert losses(Path(recipe.run_dir)) == undisturbed
