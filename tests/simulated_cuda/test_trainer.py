"""Tests of the trainer on a simulated GPU: metrics, evaluation, profile, saves and resume."""

import json

import pytest

from tests.conftest import TINY
from tests.simulated_cuda.library import UnavailableError
from tests.simulated_cuda.simulate import Case, Recording, SimulationError, try_simulate

RUN = "tests.simulated_cuda.training:run_training"
COMMON = ("training.precision=bf16", "checkpoint.interval=2")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("simulated") / "run"


@pytest.fixture(scope="module")
def results(run_dir, corpus) -> list[Recording | SimulationError]:
    """Train four steps, resume the run and train to step six, and tune another recipe."""
    recipe = run_dir.parent / "tiny.yaml"
    recipe.write_text(TINY.format(run_dir=run_dir, corpus=corpus))
    text = run_dir.parent / "text.txt"
    text.write_text("".join(f"It is line {n % 10} of it. " for n in range(60)))
    suites = [
        {"suite": "loss", "every": 4, "data": [str(text)], "context": 64, "documents": 1},
        {
            "suite": "needle", "every": 4, "haystack": str(text), "lengths": [400], "samples": 1,
            "pairs": [[1, 1]], "depths": [0.5], "answer_tokens": 2,
        },
    ]  # fmt: skip
    first = (
        *COMMON,
        "training.seq_length=400",
        "training.steps=4",
        "training.eval_interval=2",
        "training.profile={start: 2, steps: 1}",
        f"training.evaluate={json.dumps(suites)}",
    )
    cases = [
        Case(str(recipe), 1, first, run=RUN),
        Case(str(recipe), 1, (*COMMON, "training.seq_length=400", "training.steps=6"), run=RUN),
        Case(
            str(recipe),
            1,
            ("training.precision=bf16", "model.attention={kind: diff_v2, head_dim: 64}"),
            run="tests.simulated_cuda.tuning:run_tune",
        ),
    ]
    try:
        return try_simulate(cases)
    except UnavailableError as error:
        pytest.skip(f"CUDA cannot be simulated: {error}")


@pytest.mark.parametrize(("number", "steps"), [(0, [1, 4]), (1, [5, 6])])
def test_a_run_waits_for_the_device_only_in_permitted_places(number, steps, results):
    """Check that the steps of a run wait only in places that ``waits.py`` permits.

    Before a fix, DeepSpeed's timer waited around every microbatch from the third step on.
    """
    if isinstance(results[number], SimulationError):
        raise results[number]
    assert results[number].outcome == {"finished": True, "steps": steps}
    assert any("agree" in place for place in results[number].waits)


def test_a_run_leaves_checkpoints_and_metrics(results, run_dir):
    folders = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert folders[-1] == "step_00000006"
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    names = {name for entry in entries for name in entry}
    assert {"train/loss", "train/grad_norm"} <= names
    assert {name.rsplit("/", 1)[0] for name in names} >= {"eval/loss", "eval/needle"}


def test_a_run_leaves_a_profile_with_the_device_memory(results, run_dir):
    traced = {path.name for path in (run_dir / "profile").iterdir()}
    name = "rank_00000.step_00000002"
    assert traced == {f"{name}.memory.pickle", f"{name}.pt.trace.json.gz"}


def test_tune_verifies_and_times_every_backend(results):
    if isinstance(results[2], SimulationError):
        raise results[2]
    outcome = results[2].outcome
    assert outcome["capability"] == "9.0" and outcome["products"] == 15
    names = {"softmax sdpa", "softmax blocked", "softmax flex", "subtraction pytorch"}
    names |= {"softmax triton", "softmax triton:split", "subtraction triton"}
    names |= {"softmax triton:dkdv=64x64x8x3", "loss triton", "loss megatron"}
    assert outcome["problems"].keys() >= names
    assert not any(outcome["problems"].values())
