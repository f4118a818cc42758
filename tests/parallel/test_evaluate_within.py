"""Tests of evaluation suites that run during training.

On every layout, a suite must have the values that ``evaluate`` computes for the checkpoint. The
suites must not change the training.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.in_training import metric_name, open_evaluators
from diffmegatron.model.network import VirtualStage
from diffmegatron.training.monitoring.metrics import TENSORBOARD, read_metrics
from diffmegatron.training.trainer import train_stages
from tests.conftest import TINY
from tests.parallel import within_worker
from tests.ranks import launch

SHORT = (
    "training.seq_length=512",
    "training.global_batch_size=2",
    "training.micro_batch_size=2",
    "training.steps=3",
    "training.eval_interval=2",
    "checkpoint.interval=2",
)
ONE = ("training.steps=1", "optimizer.schedule.warmup_steps=0")
LAYOUTS = {
    "tensor": ("parallel.tensor=2", "parallel.sequence_parallel=true"),
    "interleaved": (
        "parallel.pipeline=2",
        "parallel.virtual_pipeline=2",
        "model.num_layers=4",
        "training.micro_batch_size=1",
    ),
    "context": ("parallel.context=2",),
}


@pytest.fixture(scope="module")
def folder(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("within")
    (found / "tiny.yaml").write_text(TINY.format(run_dir=found / "unused", corpus=corpus))
    for name, words in (("a", "the cat sat on a mat, "), ("b", "ten hens and one hen ")):
        (found / f"{name}.txt").write_text(words * 9)
    # Needles are inserted between sentences, so the text needs many sentences.
    (found / "hay.txt").write_text("".join(f"It is line {n % 10} of it. " for n in range(60)))
    return found


@pytest.fixture(scope="module")
def suites(folder: Path, corpus: Path) -> dict[str, dict]:
    """Return the settings of each suite by its name, for ``evaluate`` and for a recipe."""
    data = [f"first={folder / 'a.txt'}", f"second={folder / 'b.txt'}"]
    return {
        "loss": {"data": data, "context": 65},
        "recall": {"data": data, "training": str(corpus), "rare": 10**6, "context": 100},
        "needle": {
            "haystack": str(folder / "hay.txt"),
            "lengths": [400],
            "pairs": [[1, 1], [2, 2]],
            "depths": [0.5],
            "samples": 1,
            "answer_tokens": 4,
        },
    }


@pytest.fixture(scope="module")
def within(suites: dict[str, dict]) -> str:
    """Return the override of a recipe that runs all suites every two steps."""
    entries = [{"suite": name, "every": 2, **settings} for name, settings in suites.items()]
    return f"training.evaluate={json.dumps(entries)}"


@pytest.fixture(scope="module")
def run(folder: Path, within: str) -> Path:
    """Train in one process with the suites at steps 0, 2 and 3, and return its run_dir."""
    recipe = load_recipe(folder / "tiny.yaml", [*SHORT, within, f"run_dir={folder / 'run'}"])
    within_worker.train(recipe)
    return folder / "run"


def values(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the metrics of the suites by step."""
    entries = {e["step"]: e for e in read_metrics(run_dir) if any("eval/" in name for name in e)}
    return {
        int(step): {name: value for name, value in entry.items() if name.startswith("eval/")}
        for step, entry in entries.items()
    }


def test_suite_values_equal_evaluate_on_the_checkpoint(run, suites, folder, tmp_path):
    found = values(run)
    assert list(found) == [0, 2, 3]
    assert found[0] != found[2] != found[3]
    checkpoint = run / "checkpoints/step_00000002"
    paths = EvaluateSettings(data=tuple(suites["loss"]["data"]), haystack=folder / "hay.txt")
    settings = [
        f"{suite}.{key}={json.dumps(value)}"
        for suite, given in suites.items()
        for key, value in given.items()
        if key not in ("data", "haystack")
    ]
    evaluate([checkpoint], list(suites), tmp_path, paths, settings)
    results = json.loads((tmp_path / "results.json").read_text())["suites"]
    expected = {
        metric_name(suite, measure): each["targets"]["step_00000002"]["value"]
        for suite, result in results.items()
        for measure, each in result["measures"].items()
    }
    assert found[2] == pytest.approx(expected, abs=1e-5)
    assert {"eval/loss/nats_per_token_first", "eval/loss/bits_per_byte"} <= set(found[2])
    # The small model may find no needle, so compare not only its scores but also its answers.
    lines = (tmp_path / "needle/step_00000002.jsonl").read_text().splitlines()[1:]
    answers = [json.loads(line)["answer"] for line in lines]
    assert written(run)[2:4] == answers
    assert len(set(written(run))) > 2


def written(run_dir: Path) -> list[str]:
    """Return the answers of the suite ``needle``, two for each step at which it ran."""
    found: list[str] = json.loads((run_dir / "answers.json").read_text())
    return found


def test_suite_values_are_written_to_tensorboard(run):
    board = EventAccumulator(str(run / TENSORBOARD), {"scalars": 0}).Reload()
    found = {
        step: {
            name: pytest.approx(event.value, rel=1e-5)
            for name in board.Tags()["scalars"]
            for event in board.Scalars(name)
            if name.startswith("eval/") and event.step == step
        }
        for step in (0, 2, 3)
    }
    assert values(run) == found


def test_training_is_the_same_to_the_bit_without_suites(run, folder):
    plain = folder / "plain"
    recipe = load_recipe(folder / "tiny.yaml", [*SHORT, f"run_dir={plain}"])
    assert train_stages([recipe])
    losses = [
        [
            (e["step"], e.get("train/loss"), e.get("valid/loss"), e.get("train/grad_norm"))
            for e in read_metrics(each)
            if "train/loss" in e or "valid/loss" in e
        ]
        for each in (run, plain)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3 + 3
    ends = [open_checkpoint(CheckpointStore(each).latest()) for each in (run, plain)]
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        for name in ends[0].tensors.names():
            assert torch.equal(*(end.tensors.read_tensor(kind, name) for end in ends)), (kind, name)
    assert ends[0].state["data"] == ends[1].state["data"]


@pytest.fixture(scope="module")
def layouts(folder: Path, within: str) -> Path:
    """Train each layout on two ranks, and the deeper model of ``interleaved`` also in one process.

    The other layouts are compared with the fixture ``run``, which is a run in one process. Return
    the folder with all runs.
    """
    calls = [
        [str(folder / "tiny.yaml"), *SHORT, *ONE, within, *overrides, f"run_dir={folder / name}"]
        for name, overrides in LAYOUTS.items()
    ]
    launch(2, "tests.parallel.within_worker", *calls)
    deep = [*SHORT, *ONE, within, "model.num_layers=4", f"run_dir={folder / 'deep'}"]
    within_worker.train(load_recipe(folder / "tiny.yaml", deep))
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_same_values(name, layouts, run):
    alone = layouts / "deep" if name == "interleaved" else run
    assert values(layouts / name)[0] == pytest.approx(values(alone)[0], abs=1e-5)
    assert written(layouts / name)[:2] == written(alone)[:2]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (
            {"suite": "outliers"},
            "'outliers'; suites that can run within training are loss, r",
        ),
        (
            {"suite": "loss"},
            "training.evaluate, suite 'loss': key 'data' is missing; give it a value",
        ),
        (
            {"suite": "loss", "data": ["a"], "contxt": 5},
            "unknown key 'contxt'; did you mean",
        ),
        (
            {"suite": "loss", "data": ["{a}"], "context": 513},
            "longest item needs 513 tokens, and tr",
        ),
        ({"suite": "loss", "data": ["{a}/no.txt"]}, "no.txt"),
    ],
)
def test_an_invalid_suite_is_refused_before_the_run_starts(entry, said, folder, tmp_path):
    if "data" in entry:
        entry = entry | {"data": [each.format(a=folder / "a.txt") for each in entry["data"]]}
    value = json.dumps([{"every": 2, **entry}])
    overrides = [*SHORT, f"training.evaluate={value}", f"run_dir={tmp_path / 'run'}"]
    recipe = load_recipe(folder / "tiny.yaml", overrides)
    with pytest.raises(UserError) as caught:
        train_stages([recipe], None, open_evaluators)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_nan_leaves_a_suite_without_values_and_the_run_finishes(
    folder, within, tmp_path, monkeypatch, capfd
):
    likeliest: Callable = VirtualStage.likeliest_tokens

    def spoiled(self, logits):
        return likeliest(self, logits.index_fill(2, torch.tensor([7]), torch.nan))

    monkeypatch.setattr(VirtualStage, "likeliest_tokens", spoiled)
    overrides = [*SHORT, *ONE, within, f"run_dir={tmp_path / 'run'}"]
    recipe = load_recipe(folder / "tiny.yaml", overrides)
    assert train_stages([recipe], None, open_evaluators)
    found = values(tmp_path / "run")[1]
    assert {name.split("/")[1] for name in found} == {"loss", "recall", "needle"}
    assert [name for name in found if "/needle/" in name] == ["eval/needle/without_values"]
    assert "suite needle has no values: in item 400/N=1" in "".join(capfd.readouterr())
