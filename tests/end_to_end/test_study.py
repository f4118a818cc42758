"""Tests of studies: planned runs, result lines, and reports of invented results.

A study compares arms (named changes of a recipe), each trained with several seeds.
"""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.errors import UserError
from tests.paths import RESULTS, ROOT
from tools.benchmarks.study import missing_runs
from tools.benchmarks.study_file import Study, load_study, wanted_runs
from tools.benchmarks.study_report import write_report
from tools.benchmarks.study_runs import Lines, Runner, suite_measures

RECIPE = """
model:
  num_layers: 1
  hidden_size: 32
  attention: {{kind: diff_v1, head_dim: 8}}
  ffn_hidden_size: 32
  vocab_size: 320
data: {{tokenizer: bytes, sources: [{{path: {corpus}}}]}}
training: {{seq_length: 32, global_batch_size: 2, steps: 4}}
optimizer: {{lr: 1.0e-3}}
"""
# The corpus of docs/results/studies/README.md: hash of its content, and of its tokenizer.
ENGLISH = "329dbf31f25fff01661103ac440302c86f1b7c0570f04dca01286576a302b251"
TOKENIZER = "3b0680b8b3acb5210a3c07b245bef68cdff230ac9edc601ca4fcf267874d7a81"
# Quantiles of Student's t at 97.5%, from a printed table, by degrees of freedom.
T_TABLE = {1: 12.7062, 2: 4.3027}
VALUES = {
    "title": "Two arms",
    "recipe": "recipe.yaml",
    "arms": {"plain": {"optimizer.lr": 0.1}, "other": {"model.attention.kind": "softmax"}},
    "seeds": [1, 2, 3],
    "choice": {"key": "optimizer.eps", "grid": [1, 2, 4], "seed": 0},
    "baseline": "plain",
    "derived": {"top-1 / loss": {"mean": ["outliers: top-1", "valid/loss"], "over": ["test/loss"]}},
    "compared": {"test/loss": "difference", "outliers: top-1": "ratio", "top-1 / loss": "ratio"},
}


def make_line(arm: str, seed: int, *, chosen: str = "optimizer.eps=2", **measures: float) -> dict:
    return {
        "run": f"{arm}-{chosen}-seed{seed}",
        "size": "",
        "arm": arm,
        "seed": seed,
        "chosen": chosen,
        "is_reported": seed > 0,
        "kind": "softmax" if arm == "plain" else "diff_v1",
        "parameters": 1000,
        "parameters without embeddings": 500,
        "tokens": 4096,
        "held out": [[0, 3.0], [2048, 2.0], [4096, measures["valid/loss"]]],
        "measures": measures,
        "environment": {"torch": "2"},
    }


def names(runs: list) -> list[str]:
    return [run.name for run in runs]


def test_the_grid_grows_while_its_best_value_is_at_an_end():
    """Check that the grid grows at the end where its best value is."""
    study = Study.model_validate(VALUES | {"arms": {"plain": {}}})
    losses = {f"plain-optimizer.eps={value}-seed0": 8 - value for value in (1, 2, 4)}
    grid = names(wanted_runs(study, study.cells, losses))
    assert grid == [f"plain-optimizer.eps={value}-seed0" for value in (1, 2, 4, 8)]
    losses["plain-optimizer.eps=8-seed0"] = 5.0
    runs = wanted_runs(study, study.cells, losses)
    assert names(runs)[4:] == [f"plain-optimizer.eps=4-seed{seed}" for seed in (1, 2, 3)]
    assert [run.is_reported for run in runs] == [False] * 4 + [True] * 3
    rising = {f"plain-optimizer.eps={value}-seed0": value for value in (1, 2, 4)}
    assert names(wanted_runs(study, study.cells, rising))[0] == "plain-optimizer.eps=0.5-seed0"


def test_arms_are_run_seed_by_seed_after_the_choice():
    study = Study.model_validate(VALUES)
    losses = {
        f"{arm}-optimizer.eps={value}-seed0": abs(value - 2)
        for arm in ("plain", "other")
        for value in (1, 2, 4)
    }
    runs = wanted_runs(study, study.cells, losses)
    assert names(runs)[6:8] == ["plain-optimizer.eps=2-seed1", "other-optimizer.eps=2-seed1"]
    assert runs[7].overrides == [
        "model.attention.kind=softmax",
        "optimizer.eps=2",
        "training.seed=1",
    ]
    without = {name: loss for name, loss in losses.items() if not name.startswith("other")}
    arms = [run.cell.arm for run in wanted_runs(study, study.cells, without) if run.is_reported]
    assert arms == ["plain"] * 3


def test_every_arm_has_every_size():
    sizes = {"small": {"model.num_layers": 1}, "large": {"model.num_layers": 2}}
    study = Study.model_validate(VALUES | {"sizes": sizes, "choice": None, "seeds": [5]})
    runs = wanted_runs(study, study.cells, {})
    assert names(runs) == [f"{s}-{a}-seed5" for s in ("small", "large") for a in ("plain", "other")]
    assert runs[2].overrides == ["model.num_layers=2", "optimizer.lr=0.1", "training.seed=5"]


def test_report_intervals_equal_an_independent_computation(tmp_path):
    study = Study.model_validate(VALUES)
    losses = {"plain": [2.0, 2.1, 2.3], "other": [1.9, 2.05, 2.1]}
    largest = {"plain": [10.0, 20.0, 40.0], "other": [5.0, 8.0]}
    lines = [make_line("plain", 0, **{"valid/loss": 9.0, "test/loss": 99.0})]
    for arm, values in losses.items():
        for seed, value in enumerate(values, start=1):
            own = {"valid/loss": 1.0, "test/loss": value}
            if seed <= len(largest[arm]):
                own["outliers: top-1"] = largest[arm][seed - 1]
            lines.append(make_line(arm, seed, **own))
    write_report(study, {line["run"]: line for line in lines}, tmp_path / "study")
    report = (tmp_path / "study.md").read_text()
    assert (tmp_path / "study.png").stat().st_size > 10_000

    mean, half = interval(losses["plain"])
    assert row(report, "test/loss", "plain") == pytest.approx(
        [3, mean, mean - half, mean + half], rel=1e-3
    )
    pairs = [a - b for a, b in zip(losses["other"], losses["plain"], strict=True)]
    mean, half = interval(pairs)
    assert row(report, "test/loss", "other")[4:] == pytest.approx(
        [mean, mean - half, mean + half], rel=1e-3
    )
    mean, half = interval([math.log(5 / 10), math.log(8 / 20)])
    ends = [math.exp(mean), math.exp(mean - half), math.exp(mean + half)]
    assert row(report, "outliers: top-1", "other")[4:] == pytest.approx(ends, rel=1e-3)
    first, second = math.log((5 + 1) / 1.9 / ((10 + 1) / 2)), math.log(9 / 2.05 / (21 / 2.1))
    mean, half = interval([first, second])
    ends = [math.exp(mean), math.exp(mean - half), math.exp(mean + half)]
    assert row(report, "top-1 / loss", "other")[4:] == pytest.approx(ends, rel=1e-3)
    assert "| plain | **9.0000** |" in report


def test_report_has_the_difference_of_held_out_losses_by_tokens(tmp_path):
    study = Study.model_validate(VALUES | {"choice": None})
    finals = {"plain": [2.0, 2.1, 2.3], "other": [1.9, 2.05]}
    lines = [
        make_line(arm, seed, **{"valid/loss": loss, "test/loss": loss})
        for arm, losses in finals.items()
        for seed, loss in enumerate(losses, start=1)
    ]
    write_report(study, {line["run"]: line for line in lines}, tmp_path / "study")
    found = row((tmp_path / "study.md").read_text(), BY_TOKENS, "other, difference to plain")
    # At 2,048 tokens every line has the loss 2.0, so that the first difference is exactly 0.
    mean, half = interval([1.9 - 2.0, 2.05 - 2.1])
    assert found[:3] == [0, 0, 0]
    assert found[3:] == pytest.approx([mean, mean - half, mean + half], rel=1e-3)


BY_TOKENS = "Held-out loss by tokens"
ALONG = {
    "every": 2,
    "evaluate": ["--suite", "loss"],
    "compared": {"loss: a": "difference", "loss: b": "ratio"},
}


def test_report_has_measures_during_training(tmp_path):
    """Check the means and comparisons at each number of tokens against another computation."""
    study = Study.model_validate(VALUES | {"along": ALONG})
    values = {"plain": [[2.0, 2.5, 2.1], [1.0, 1.5, 1.2]], "other": [[3.0, 3.1, 3.9], [0.5, 0.7]]}
    lines = []
    for arm, points in values.items():
        for seed in (1, 2, 3):
            line = make_line(arm, seed, **{"valid/loss": 1.0})
            line["along"] = {
                "points": [
                    [2048 * number, {"loss: a": of_seeds[seed - 1], "loss: b": of_seeds[seed - 1]}]
                    for number, of_seeds in enumerate(points, start=1)
                    if seed <= len(of_seeds)
                ]
            }
            lines.append(line)
    write_report(study, {line["run"]: line for line in lines}, tmp_path / "study")
    assert (tmp_path / "study_along.png").stat().st_size > 10_000
    report = (tmp_path / "study.md").read_text()

    found = row(report, "loss: a", "plain", level=3)
    for number, of_seeds in enumerate(values["plain"]):
        mean, half = interval(of_seeds)
        ends = [mean, mean - half, mean + half]
        assert found[3 * number : 3 * number + 3] == pytest.approx(ends, rel=1e-3)
    found = row(report, "loss: b", "other, ratio to plain", level=3)
    mean, half = interval([math.log(3 / 2), math.log(3.1 / 2.5), math.log(3.9 / 2.1)])
    assert found[:3] == pytest.approx([*map(math.exp, (mean, mean - half, mean + half))], rel=1e-3)
    mean, half = interval([math.log(0.5 / 1), math.log(0.7 / 1.5)])
    assert found[3:] == pytest.approx([*map(math.exp, (mean, mean - half, mean + half))], rel=1e-3)


def test_report_has_the_shares_of_parameters_and_tokens_at_equal_loss(tmp_path):
    """Check the shares of the baseline's parameters and tokens at equal loss, and their intervals.

    The invented losses are a power law of the parameters times a power law of the tokens, times a
    factor for each arm and seed. The expected shares follow from the exponents and the factors. The
    exponent of the tokens depends on the model's size, so the report must fit a separate law of the
    tokens to each size.
    """
    sizes = {"small": {"model.num_layers": 1}, "large": {"model.num_layers": 2}}
    plan = {"sizes": sizes, "scaling": ["parameters", "tokens"], "choice": None}
    study = Study.model_validate(VALUES | plan)
    factors = {"plain": [1.0, 1.01, 0.99], "other": [0.95, 0.98, 0.96]}
    exponents = {"small": 0.2, "large": 0.3}
    lines = {}
    for name, parameters in (("small", 1000), ("large", 4000)):
        for arm, of_seeds in factors.items():
            for seed, factor in enumerate(of_seeds, start=1):
                losses = [
                    [tokens, 9 * parameters**-0.1 * (tokens / 4096) ** -exponents[name] * factor]
                    for tokens in (1024, 2048, 4096)
                ]
                line = make_line(arm, seed, chosen=name, **{"valid/loss": 1.0})
                line |= {"size": name, "held out": [[0, 50.0], *losses]}
                line["parameters without embeddings"] = parameters
                lines[line["run"]] = line
    write_report(study, lines, tmp_path / "study")
    report = (tmp_path / "study.md").read_text()
    ratios = [a / b for a, b in zip(factors["other"], factors["plain"], strict=True)]
    for against, exponent_of in (("parameters", dict.fromkeys(sizes, 0.1)), ("tokens", exponents)):
        for name in sizes:
            mean, half = interval([math.log(ratio) / exponent_of[name] for ratio in ratios])
            ends = [math.exp(mean), math.exp(mean - half), math.exp(mean + half)]
            found = row(report, f"Share of plain's {against} at equal loss", f"{name}, other")
            assert found == pytest.approx([3, *ends], rel=1e-3)


def interval(values: list[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95% confidence interval, by textbook formulas."""
    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return mean, T_TABLE[count - 1] * math.sqrt(variance / count)


def row(report: str, measure: str, arm: str, level: int = 2) -> list[float]:
    """Return the numbers of an arm in the table of a measure.

    Args:
        report: text of the report, in Markdown.
        measure: heading above the table.
        arm: first cell of the arm's row.
        level: number of ``#`` characters of the heading.
    """
    section = report.split(f"{'#' * level} {measure}\n")[1].split("\n##")[0]
    (line,) = [line for line in section.splitlines() if line.startswith(f"| {arm} |")]
    return [
        float(number) for number in re.findall(r"[-+]?\d+\.?\d*", line.removeprefix(f"| {arm}"))
    ]


def test_lines_are_sorted_and_replaced(tmp_path):
    path = tmp_path / "results" / "study.jsonl"
    lines = Lines(path)
    for seed in (2, 1, 2):
        lines.add(make_line("plain", seed, **{"valid/loss": float(seed)}))
    assert [line["seed"] for line in Lines(path).by_run.values()] == [1, 2]
    assert not list(path.parent.glob("*.tmp"))


def test_a_run_of_another_study_is_reused(tmp_path, corpus):
    """Check that a study reuses a run of another study that has the same settings and evaluation.

    The result line gets the names of the study that reuses it. A finished run of the same name with
    other settings is an error.
    """
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(corpus=corpus))
    plan = VALUES | {"choice": None, "arms": {"plain": {}, "other": {"optimizer.lr": 0.5}}}
    study = Study.model_validate(plan)
    runner = Runner(study, tmp_path / "recipe.yaml", tmp_path / "runs")
    (first, *_) = missing_runs(study, study.cells, runner, Lines(tmp_path / "out" / "new.jsonl"))
    settings = {"settings": runner._settings(first), "evaluate": []}
    other = make_line("renamed", 1, **{"valid/loss": 3.5}) | settings
    Lines(tmp_path / "out" / "old.jsonl").add(other)

    lines = Lines(tmp_path / "out" / "new.jsonl")
    missing = missing_runs(study, study.cells, runner, lines)
    assert first.name == "plain-seed1" and first not in missing and len(missing) == 5
    taken = lines.by_run["plain-seed1"]
    assert taken["arm"] == "plain" and taken["measures"] == other["measures"]
    with_suites = Study.model_validate(plan | {"evaluate": ["--suite", "loss"]})
    runner = Runner(with_suites, tmp_path / "recipe.yaml", tmp_path / "runs")
    assert first in missing_runs(with_suites, study.cells, runner, lines)
    changed = study.model_copy(update={"arms": {"plain": {"optimizer.lr": 0.7}}})
    with pytest.raises(UserError, match="'plain-seed1' with other settings or of another corpus"):
        missing_runs(changed, changed.cells, runner, lines)


@pytest.mark.parametrize("name", ["initialization", "language_modelling", "sizes"])
def test_recorded_settings_are_still_found(name, tmp_path, monkeypatch):
    """Check that the committed runs are runs of today's recipes, whatever keys were added since.

    Else a study would train them again, and ``--repeat`` would refuse them.
    """
    manifest = SimpleNamespace(content=ENGLISH, tokenizer=SimpleNamespace(sha256=TOKENIZER))
    monkeypatch.setattr("tools.benchmarks.study_runs.read_corpus_manifest", lambda _: manifest)
    path = ROOT / "tools" / "benchmarks" / "studies" / f"{name}.yaml"
    study = load_study(path)
    lines = Lines(RESULTS / "studies" / f"{name}.jsonl").by_run
    runner = Runner(study, path.parent / study.recipe, tmp_path)
    losses = {run: line["measures"]["valid/loss"] for run, line in lines.items()}
    runs = wanted_runs(study, study.cells, losses)
    assert {run.name for run in runs} == set(lines)
    assert all(runner.is_finished(run, lines[run.name]) for run in runs)


def test_checkpoints_during_training_are_kept_and_evaluated(tmp_path, corpus, monkeypatch):
    """Check that the result line has the measures of the checkpoint of every second step.

    A missing checkpoint is an error. A stub replaces the commands of ``diffmegatron``.
    """
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(corpus=corpus))
    plan = VALUES | {"choice": None, "arms": {"plain": {}}, "seeds": [1], "along": ALONG}
    study = Study.model_validate(plan)
    (run,) = wanted_runs(study, study.cells, {})
    runner = Runner(study, tmp_path / "recipe.yaml", tmp_path / "runs")
    line = make_line("plain", 1, **{"valid/loss": 3.5}) | {"settings": runner._settings(run)}
    steps = [f"step_{step:08d}" for step in (2, 4)]
    commands = []

    def fake(run, command, *arguments):
        commands.append([command, *map(str, arguments)])
        if command == "evaluate":
            out = Path(arguments[-1])
            out.mkdir(parents=True)
            measures = {
                "nats": {"targets": {name: {"value": n} for n, name in enumerate(steps)}},
            }
            suites = {"loss": {"measures": measures, "totals": {}}}
            (out / "results.json").write_text(json.dumps({"suites": suites}))

    monkeypatch.setattr(runner, "_call", fake)
    monkeypatch.setattr(runner, "_line", lambda *_: dict(line))
    monkeypatch.setattr(CheckpointStore, "complete", lambda _: [2, 4])
    finished = runner.finish(run)
    run_dir = tmp_path / "runs" / "plain-seed1"
    assert "checkpoint.keep_every=2" in commands[0]
    assert commands[1][:5] == [
        "evaluate",
        *(str(run_dir / "checkpoints" / step) for step in steps),
        "--suite",
        "loss",
    ]
    assert finished["along"]["points"] == [[128, {"loss: nats": 0}], [256, {"loss: nats": 1}]]
    finished["evaluate"] = []
    assert runner.is_finished(run, finished)
    assert not runner.is_finished(run, line | {"evaluate": []})
    monkeypatch.setattr(CheckpointStore, "complete", lambda _: [4])
    with pytest.raises(UserError, match=r"has no checkpoint of step 2; make along\.every a"):
        runner.finish(run)


def test_measure_names_begin_with_their_suite():
    estimate = {"value": 2.5, "low": 2.0, "high": 3.0, "items": 9}
    total = {"value": 7, "low": None, "high": None, "items": None}
    results = {
        "suites": {
            "loss": {
                "measures": {
                    "nats": {"targets": {"run": estimate}},
                    "none": {"targets": {"run": None}},
                },
                "totals": {"run": {"tokens": total}, "other": {"tokens": estimate}},
            }
        }
    }
    assert suite_measures(results, "run") == {"loss: nats": 2.5, "loss: tokens": 7}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"baseline": "none"}, "baseline is 'none'; give one of plain, other"),
        ({"seeds": [0, 1]}, "choice.seed 0 is one of seeds [0, 1]"),
        ({"choice": {"key": "k", "grid": [2, 1, 3], "seed": 0}}, "its values must increase"),
        ({"arms": {"a/b": {}}}, "arms.a/b"),
        ({"scaling": ["parameters"]}, "the study has 0 named sizes; a power law needs two or more"),
    ],
)
def test_an_invalid_study_file_is_an_error(tmp_path, changes, sentence):
    path = tmp_path / "study.yaml"
    path.write_text(repr(VALUES | changes).replace("None", "null"))
    with pytest.raises(UserError, match=re.escape(sentence)):
        load_study(path)
