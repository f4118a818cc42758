"""Tests of ``diffmegatron compare``: figures, stages, names of runs and refused runs."""

import json
import random
import re
import statistics
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffmegatron.cli import app
from diffmegatron.errors import UserError
from diffmegatron.evaluation.compare import read_run, short_names
from diffmegatron.evaluation.run_conclusions import RunResult, conclude, paired_difference
from tests.conftest import TINY

STEPS = 40


def write_run(
    run_dir: Path, lambdas: int = 0, start_from: Path | None = None, batch: int = 8
) -> list[dict[str, float]]:
    """Write a run of 40 steps of ``batch`` x 64 tokens, and return its entries of metrics.jsonl.

    Args:
        run_dir: directory of the run.
        lambdas: number of layers whose lambda is recorded; 0 for a Transformer without lambdas.
        start_from: run of the stage before this one, if any.
        batch: number of sequences per step.
    """
    draw = random.Random(str(run_dir))
    kind = "diff_v1" if lambdas else "softmax"
    text = TINY.format(run_dir=run_dir, corpus="corpus").replace("kind: diff_v1", f"kind: {kind}")
    text = text.replace("global_batch_size: 8", f"global_batch_size: {batch}")
    if start_from is not None:
        text = text.replace("checkpoint:\n", f"checkpoint:\n  start_from: {start_from}\n")
    run_dir.mkdir(parents=True)
    (run_dir / "recipe.yaml").write_text(text)
    entries: list[dict[str, float]] = []
    for step in range(2, STEPS + 1, 2):
        entry = {
            "step": step,
            "train/loss": 5 * draw.random(),
            "train/loss_tokens": draw.randrange(1, 1000),
            "train/loss_tokens/web": draw.randrange(1, 1000),
            "train/loss/web": 5 * draw.random(),
            "perf/tokens_per_second": 1000 * draw.random(),
        }
        for layer in range(1, lambdas + 1):
            entry[f"attn/lambda_layer_{layer:02d}"] = draw.random()
        if step % 20 == 0:
            entries.append({"step": step, "valid/loss": 5 * draw.random()})
        entries.append(entry)
    lines = (json.dumps(entry | {"time": 1.0}) + "\n" for entry in entries)
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    return entries


def compare(out: Path, *run_dirs: Path) -> str:
    arguments = ["compare", *map(str, run_dirs), "--out", str(out)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_final_figures_are_those_of_the_entries(tmp_path):
    entries = write_run(tmp_path / "diff", lambdas=2)
    write_run(tmp_path / "plain")
    printed = compare(tmp_path / "out", tmp_path / "diff", tmp_path / "plain")
    figures = json.loads((tmp_path / "out" / "compare.json").read_text())
    found = figures["diff"]
    # The last tenth of the 40 steps begins after step 36, so it has entries of steps 38 and 40.
    last = [(e["train/loss"], e["train/loss_tokens"]) for e in entries if len(e) > 2][-2:]
    mean = statistics.fmean(*zip(*last, strict=True))
    assert found["train/loss"] == pytest.approx(mean)
    web = [(e["train/loss/web"], e["train/loss_tokens/web"]) for e in entries if len(e) > 2]
    assert found["train/loss/web"] == pytest.approx(statistics.fmean(*zip(*web[-2:], strict=True)))
    assert found["valid/loss"] == [e["valid/loss"] for e in entries if "valid/loss" in e][-1]
    speeds = [e["perf/tokens_per_second"] for e in entries if len(e) > 2]
    assert found["tokens per second"] == round(statistics.median(speeds))
    lambdas = [entries[-1][f"attn/lambda_layer_{layer:02d}"] for layer in (1, 2)]
    assert found["lambda, mean of the layers"] == pytest.approx(statistics.mean(lambdas))
    assert (found["steps"], found["tokens"]) == (40, 40 * 8 * 64)
    assert "lambda, mean of the layers" not in figures["plain"]
    table = (tmp_path / "out" / "compare.md").read_text()
    assert "|  | diff | plain |" in table and "| tokens | 20,480 | 20,480 |" in table
    sentence = re.search(r"^Transformer .* is undecided beside Diff Transformer .*$", printed, re.M)
    assert sentence and "one seed each does not compare" in sentence[0]
    assert table.startswith(f"# Runs compared\n\n- {sentence[0]}\n\n|  | diff |")
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_stages_follow_one_another_by_tokens(tmp_path):
    run_dir = tmp_path / "run"
    first = write_run(run_dir / "z", lambdas=1)
    second = write_run(run_dir / "a", lambdas=1, start_from=run_dir / "z", batch=16)
    # This stage has begun, but has no metrics yet.
    write_run(run_dir / "b", start_from=run_dir / "a")
    (run_dir / "b" / "metrics.jsonl").unlink()
    run = read_run(run_dir)
    losses = [(e["step"] * 8 * 64, e["train/loss"]) for e in first if "train/loss" in e]
    after = 40 * 8 * 64
    losses += [(after + e["step"] * 16 * 64, e["train/loss"]) for e in second if "train/loss" in e]
    assert (run.series("train/loss"), run.starts) == (losses, [0, after])
    assert compare(tmp_path / "out", run_dir)
    (figures,) = json.loads((tmp_path / "out" / "compare.json").read_text()).values()
    assert (figures["stages"], figures["steps"]) == ("z, a", 80)
    assert figures["tokens"] == after + 40 * 16 * 64
    last = [(e["train/loss"], e["train/loss_tokens"]) for e in second if "train/loss" in e][-2:]
    mean = statistics.fmean(*zip(*last, strict=True))
    assert figures["train/loss"] == pytest.approx(mean)
    write_run(run_dir / "c", start_from=run_dir / "z")
    with pytest.raises(UserError, match="run has several stages from which no other"):
        read_run(run_dir)
    assert len(read_run(run_dir / "a").stages) == 1


def test_runs_are_named_by_their_shortest_distinct_paths(tmp_path):
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "c"]
    assert short_names(paths[1:]) == ["run", "c"]
    assert short_names(paths) == ["a/run", "b/run", "c"]
    with pytest.raises(UserError, match="run is given twice; give each run once"):
        short_names([paths[0], tmp_path / "b" / ".." / "a" / "run"])


def test_a_missing_or_empty_run_is_an_error_and_nothing_is_written(tmp_path):
    write_run(tmp_path / "good")
    write_run(tmp_path / "begun")
    (tmp_path / "begun" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"none has no recipe\.yaml \(No such file"):
        compare(tmp_path / "out", tmp_path / "good", tmp_path / "none")
    with pytest.raises(UserError, match=r"metrics.jsonl has no entries; train the run for a step"):
        compare(tmp_path / "out", tmp_path / "good", tmp_path / "begun")
    assert not (tmp_path / "out").exists()


def test_a_difference_over_seeds_has_the_interval_of_students_t():
    # 0.1, 0.2 and 0.3: mean 0.2, standard deviation 0.1, t = 4.303 with two degrees of freedom.
    found = paired_difference([(1.1, 1.0), (2.2, 2.0), (3.3, 3.0)])
    assert found.interval == pytest.approx((0.2 - 4.303 * 0.1 / 3**0.5, 0.2 + 0.2484), abs=1e-3)
    assert found.finding == "undecided"
    assert paired_difference([(2.0, 1.0), (2.01, 1.0)]).finding == "worse"
    assert paired_difference([(1.0, 2.0), (1.0, 2.01)]).finding == "better"


def test_networks_are_compared_by_runs_with_equal_seeds():
    def run(kind: str, seed: int, loss: float, tokens: int = 100) -> RunResult:
        return RunResult(kind, 7, tokens, seed, {"valid/loss": loss}, {"data.tokenizer": ["bytes"]})

    plain = [run("Transformer", seed, 2.0 + seed) for seed in (1, 2, 3)]
    ours = [run("Diff", seed, 1.5 + seed + seed / 1000) for seed in (3, 2, 1)]
    (sentence,) = conclude([*plain, *ours])
    assert sentence.startswith("Diff (7 parameters, 100 tokens, seeds 3, 2, 1) is better beside")
    assert "valid/loss -0.4980 [-0.5005, -0.4955] nats per token (↓) over 3 seeds." in sentence
    (sentence,) = conclude([*plain[:2], run("Diff", 1, 2.5), run("Diff", 2, 4.5)])
    assert "is undecided" in sentence and sentence.endswith("; more seeds narrow the interval.")
    (sentence,) = conclude([plain[0], run("Diff", 5, 1.0)])
    assert sentence.endswith("undecided beside Transformer (7 parameters, 100 tokens, seed 1): "
                             "no seed is common to both.")  # fmt: skip
    assert "have the same seed" in conclude([plain[0], plain[0], ours[0]])[0]
    assert "100 to 200 tokens" in conclude([plain[0], run("Diff", 1, 1.0, tokens=200)])[0]
    assert "no kinds are compared" in conclude(plain)[0]
    other = plain[0]._replace(data={"data.tokenizer": ["cl100k_base"]})
    assert conclude([ours[0], other]) == [
        "Nothing is concluded, because the runs have different data (data.tokenizer)."
    ]
    assert "no held-out loss" in conclude([run("Diff", 1, 1.0)._replace(figures={})])[0]
