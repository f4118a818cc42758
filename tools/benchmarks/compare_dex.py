"""Extend a pretrained model by DEX, and compare the result with control runs.

    python -m tools.benchmarks compare_dex smollm2 texts --out docs/results/dex_smollm2.json
    python -m tools.benchmarks compare_dex smollm2 texts --part arms --steps 24

DEX makes selected attention heads of a pretrained model differential: it subtracts from their
output a term with the projection W_D and the factor lambda. During T annealing steps, a schedule
gradually replaces the initial lambda, which is 0, by a trained number.

MODEL is a Hugging Face folder that ``diffmegatron import`` reads. TEXTS are files or folders that
``diffmegatron prepare`` reads. Every run is ``diffmegatron train`` of one recipe with overrides.
Runs with the same seed train on the same batches. Finished runs are kept, so the command can be
interrupted and repeated. It writes OUT.json (``--out``), OUT.md and OUT.png.

The comparison has three parts, which ``--part`` selects:

- ``arms`` compares choices of the parameters to train. DEX trains the key, value and output
  projections and the DEX term; its heads are selected by entropy or by gradient, and one arm has a
  smaller learning rate of the term. The control trains the same projections without the term. The
  last two arms are LoRA with as many parameters, and all parameters.
- ``starts`` compares initial values, learning rates and annealing steps of the DEX term over
  several seeds.
- ``throughput`` times the arms alternately in short runs, and the exported DEX model against the
  original. This part needs a machine without other work.

The results of a part that is not run now are kept in OUT.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.benchmarks.json_report import write_json_report

LENGTH = 512
RECIPE = """
extends: {work}/model/recipe.yaml
run_dir: {work}/runs/unnamed
checkpoint: {{start_from: {work}/model, interval: 1000000}}
data: {{sources: [{{path: {work}/texts}}], validation_fraction: 0.05}}
model:
  attention:
    kind: dex
    selected_heads: {work}/entropy.yaml
    annealing_steps: {steps}
training:
  seq_length: {length}
  global_batch_size: {batch}
  micro_batch_size: {batch}
  steps: {steps}
  precision: bf16
  log_interval: 1
  eval_interval: 1000000
  eval_batches: {held_out}
optimizer:
  lr: 1.0e-4
  schedule: {{kind: cosine, warmup_steps: null, warmup_ratio: 0.03, final_lr: 0}}
  trainable:
    - "*.linear_qkv.weight:[kv]"
    - "*.self_attention.linear_proj.weight"
    - "*.dex_projection"
    - "*.lambda_learn"
  lr_multipliers: {{"*.dex_projection": 100, "*.lambda_learn": 100}}
"""
PLAIN = ["model.baseline=true"]
ALL = [*PLAIN, "optimizer.trainable=null"]
THIRTY = ["optimizer.lr_multipliers={{'*.dex_projection': 30, '*.lambda_learn': 30}}"]
# For each arm of the part "arms", its label in tables and its overrides of the recipe. In
# SmolLM2-135M, LoRA of rank 66 trains as many parameters as DEX does.
ARMS: dict[str, tuple[str, list[str]]] = {
    "control": ("W_K, W_V, W_O without the term", PLAIN),
    "dex-entropy": ("DEX, heads by entropy", []),
    "dex-gradient": (
        "DEX, heads by gradient",
        ["model.attention.selected_heads={work}/gradient.yaml"],
    ),
    "dex-entropy-30": ("DEX, heads by entropy, 30 times the rate", THIRTY),
    "lora": ("LoRA of rank 66", [*ALL, "model.lora={{rank: 66, alpha: 132}}"]),
    "full": ("everything, at 1e-5", [*ALL, "optimizer.lr=1e-5"]),
}
NORMAL = ["model.attention.projection_init={{kind: normal, scale: 0.02}}"]
STARTS: dict[str, tuple[str, list[str]]] = {
    "control": ("without the term", PLAIN),
    "zero-30": ("W_D zero, 30 times the rate, T all steps", THIRTY),
    "zero-30-half": (
        "W_D zero, 30 times the rate, T half of the steps",
        [*THIRTY, "model.attention.annealing_steps={half}"],
    ),
    "zero-100": ("W_D zero, 100 times the rate, T all steps", []),
    "zero-300": (
        "W_D zero, 300 times the rate, T all steps",
        ["optimizer.lr_multipliers={{'*.dex_projection': 300, '*.lambda_learn': 300}}"],
    ),
    "normal-30": ("W_D normal 0.02, 30 times the rate, T all steps", [*THIRTY, *NORMAL]),
}


def main(arguments: argparse.Namespace) -> None:
    """Run the unfinished runs of the selected parts, and write the report."""
    work = arguments.work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    prepare(arguments.model, arguments.texts, work)
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "model": arguments.model.name,
        "seq_length": LENGTH,
    }
    if arguments.out.exists():
        kept = json.loads(arguments.out.read_text())
        if any(kept[key] != value for key, value in report.items()):
            sys.exit(
                f"compare_dex: {arguments.out} has results of another model, sequence length or "
                "machine; give another --out"
            )
        report = kept
    if arguments.part in ("arms", "all"):
        for found in compare(work, "arms", ARMS, arguments.steps, 2, range(1, 2)):
            report["arms"] = found
            write(report, arguments.out)
    if arguments.part in ("starts", "all"):
        seeds = range(1, 1 + arguments.seeds)
        for found in compare(work, "starts", STARTS, arguments.start_steps, 1, seeds):
            report["starts"] = found
            write(report, arguments.out)
    if arguments.part in ("throughput", "all"):
        turns = range(1, 1 + arguments.seeds)
        for found in compare(work, "throughput", ARMS, arguments.timed_steps, 2, turns, 2):
            report["throughput"] = found
        report["inference"] = inference(arguments.model, work, arguments.timed_steps)
        write(report, arguments.out)
    print(arguments.out.with_suffix(".md").read_text())


def diffmegatron(*arguments: object) -> None:
    """Run a command of diffmegatron with this Python; exit if it fails."""
    command = [sys.executable, "-m", "diffmegatron", *map(str, arguments)]
    if (status := subprocess.run(command, check=False).returncode) != 0:
        sys.exit(f"compare_dex: {' '.join(command[2:])!r} failed with exit status {status}")


def prepare(model: Path, texts: list[Path], work: Path) -> None:
    """Import the model, tokenize the texts and select heads by both methods, if not yet done."""
    if not (work / "model").exists():
        diffmegatron("import", model, work / "model")
    if not (work / "texts.json").exists():
        tokenizer = work / "model" / "hugging_face"
        diffmegatron("prepare", *texts, "--output", work / "texts", "--tokenizer", tokenizer)
    for method in ("entropy", "gradient"):
        if not (out := work / f"{method}.yaml").exists():
            selecting = ["--data", work / "texts", "--method", method, "--sequences", 8]
            length = f"training.seq_length={LENGTH}"
            diffmegatron("dex", "select", work / "model", length, *selecting, "--out", out)


def compare(
    work: Path,
    part: str,
    arms: dict[str, tuple[str, list[str]]],
    steps: int,
    batch: int,
    seeds: range,
    held_out: int = 16,
) -> Iterator[dict[str, Any]]:
    """Run all arms with each seed; after each run, yield the results of all runs so far.

    Args:
        work: folder of the runs.
        part: name of the part, used in the names of its recipe and runs.
        arms: label and overrides of each arm by name.
        steps: optimizer steps of each run.
        batch: sequences per step.
        seeds: values of ``training.seed``.
        held_out: number of sequences for the held-out loss.
    """
    recipe = work / f"{part}.yaml"
    values = {"steps": steps, "length": LENGTH, "batch": batch, "held_out": held_out // batch}
    recipe.write_text(RECIPE.format(work=work, **values))
    results: dict[str, Any] = {}
    for seed in seeds:
        for name, (words, overrides) in arms.items():
            run_dir = work / "runs" / f"{part}-{name}-{steps}-{seed}"
            chosen = [each.format(work=work, half=steps // 2) for each in overrides]
            given = [f"run_dir={run_dir}", f"training.seed={seed}", *chosen]
            diffmegatron("train", recipe, *given)
            arm = results.setdefault(name, {"words": words, "runs": []})
            arm["runs"].append({"seed": seed} | outcome(run_dir))
            yield {"steps": steps, "tokens": steps * LENGTH * batch, "arms": results}


def outcome(run_dir: Path) -> dict[str, Any]:
    """Read figures of a finished run from its metrics.

    Returns:
        A dict with the held-out loss in nats before and after training, the mean lambda over the
        layers after training (None without lambda), and the median tokens per second.
    """
    from diffmegatron.training.monitoring.metrics import read_metrics

    entries = list(read_metrics(run_dir))
    held_out = [entry["valid/loss"] for entry in entries if "valid/loss" in entry]
    last = next(entry for entry in reversed(entries) if "train/loss" in entry)
    lambdas = [value for name, value in last.items() if name.startswith("attn/lambda_layer_")]
    rates = [entry["perf/tokens_per_second"] for entry in entries if "train/loss" in entry]
    return {
        "loss_before": held_out[0],
        "loss_after": held_out[-1],
        "lambda_mean": statistics.mean(lambdas) if lambdas else None,
        "tokens_per_second": statistics.median(rates),
    }


def inference(model: Path, work: Path, steps: int) -> dict[str, float]:
    """Return the speed of the exported DEX model divided by that of the original, by phase.

    The phases are prefill, decoding and training.
    """
    run_dir = work / "runs" / f"throughput-dex-entropy-{steps}-1"
    if not (export := run_dir / "hf").exists():
        diffmegatron("export", run_dir, export)
    out, context = work / "inference", f"throughput.context={LENGTH}"
    asked = ["--suite", "throughput", "--set", context]
    diffmegatron("evaluate", model, export, *asked, "--out", out)
    results = json.loads((out / "results.json").read_text())
    ratios: dict[str, float] = results["suites"]["throughput"]["across"]
    return {name.split(":")[0]: ratio for name, ratio in ratios.items()}


def write(report: dict[str, Any], out: Path) -> None:
    """Write the report as JSON, its tables as Markdown, and a picture of the held-out losses."""
    write_json_report(out, report)
    parts = [report[part] for part in ("arms", "starts") if part in report]
    tables = [table(part) for part in parts]
    if "throughput" in report:
        tables.append(speeds(report["throughput"], report["inference"]))
    out.with_suffix(".md").write_text("\n".join(tables))
    if parts:
        draw(parts, out.with_suffix(".png"))


def gains(part: dict[str, Any], name: str) -> list[float]:
    """Return, for each seed, how far an arm's held-out loss is below the control's, in nats."""
    control = {run["seed"]: run["loss_after"] for run in part["arms"]["control"]["runs"]}
    return [control[run["seed"]] - run["loss_after"] for run in part["arms"][name]["runs"]]


def table(part: dict[str, Any]) -> str:
    """Return the results of a part as a Markdown table of means over the seeds.

    For the gain over the control, the standard deviation over the seeds is shown too.
    """
    lines = [
        f"{part['tokens']:,} tokens in {part['steps']} steps; "
        f"{len(part['arms']['control']['runs'])} seeds. Held-out loss in nats.\n",
        "| trained | before | after | below the control | lambda at the end |",
        "|---|---|---|---|---|",
    ]
    for name, arm in part["arms"].items():
        below = gains(part, name)
        spread = f" ± {statistics.stdev(below):.4f}" if len(below) > 1 else ""
        means = {
            key: statistics.mean(run[key] for run in arm["runs"])
            for key in ("loss_before", "loss_after")
        }
        lambdas = [run["lambda_mean"] for run in arm["runs"] if run["lambda_mean"] is not None]
        end = f"{statistics.mean(lambdas):.3f}" if lambdas else ""
        lines.append(
            f"| {arm['words']} | {means['loss_before']:.4f} | {means['loss_after']:.4f} | "
            f"{statistics.mean(below):+.4f}{spread} | {end} |"
        )
    return "\n".join(lines) + "\n"


def speeds(part: dict[str, Any], inference: dict[str, float]) -> str:
    """Return a Markdown table of training speeds relative to the arm that trains all parameters.

    A line after the table has the exported model's speed relative to the original model.

    Args:
        part: results of the part ``throughput``. A turn is one run of every arm, with one seed.
        inference: result of :func:`inference`.
    """
    arms = part["arms"]
    rates = {name: [run["tokens_per_second"] for run in arms[name]["runs"]] for name in arms}
    lines = [
        f"Tokens per second in {part['steps']} steps, over everything's in the same turn; "
        f"{len(rates['full'])} turns.\n",
        "| trained | median | least | most |",
        "|---|---|---|---|",
    ]
    for name, arm in arms.items():
        over = [mine / full for mine, full in zip(rates[name], rates["full"], strict=True)]
        lines.append(
            f"| {arm['words']} | {statistics.median(over):.2f} | {min(over):.2f} | "
            f"{max(over):.2f} |"
        )
    served = ", ".join(f"{phase} {ratio:.2f}" for phase, ratio in inference.items())
    return "\n".join(lines) + f"\n\nThe export over the model it extends: {served}.\n"


def draw(parts: list[dict[str, Any]], path: Path) -> None:
    """Plot held-out losses after training, with one panel per part and one dot per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(parts), 1, figsize=(8, 3.2 * len(parts)), squeeze=False)
    for panel, part in zip(panels[:, 0], parts, strict=True):
        arms = list(reversed(part["arms"].values()))
        for height, arm in enumerate(arms):
            losses = [run["loss_after"] for run in arm["runs"]]
            panel.plot(losses, [height] * len(losses), "o", color="#1f5fa8", alpha=0.7)
            panel.plot([statistics.mean(losses)], [height], "|", color="black", markersize=18)
        panel.set_yticks(range(len(arms)), [arm["words"] for arm in arms])
        panel.set_ylim(-0.5, len(arms) - 0.5)
        panel.set_xlabel(f"held-out loss after {part['tokens']:,} tokens (nats)")
        panel.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
