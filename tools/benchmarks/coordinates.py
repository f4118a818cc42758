"""Check muP: how far outputs move in the first steps, at several widths, with and without it.

Networks of different widths train on one batch of random tokens with one learning rate, once with
``model.initialization.scheme: scaled`` and once with ``mup``. After some steps, the root mean
square of the change since the start is measured for the attention and the MLP of the last layer,
for the final norm's input, and for the logits. This is the "coordinate check" of arXiv 2203.03466,
appendix D.1. With muP, the changes hardly depend on the width.

    OMP_NUM_THREADS=1 python -m tools.benchmarks coordinates
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.schema import Recipe
from diffmegatron.model.build import build_model
from diffmegatron.model.network import Network
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import process_groups
from tools.benchmarks.cpu_step import our_step, random_batch
from tools.benchmarks.json_report import write_json_report
from tools.benchmarks.machine import describe_machine

SCHEMES = {"scaled": "standard", "mup": "muP"}
LENGTH, VOCABULARY = 128, 256


def main(arguments: argparse.Namespace) -> None:
    """Measure, and write the report and its picture."""
    torch.set_num_threads(1)
    report = {
        "command": "OMP_NUM_THREADS=1 python -m tools.benchmarks coordinates",
        "machine": describe_machine("cpu"),
        **{name: getattr(arguments, name) for name in ("kind", "widths", "steps", "lr", "seeds")},
        "changes": {scheme: changes(scheme, arguments) for scheme in SCHEMES},
    }
    write_json_report(arguments.out, report)
    write_plot(arguments.out.with_suffix(".png"), report)


def changes(scheme: str, arguments: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Return for each output its change, as rows of ``steps`` and columns of ``widths``.

    A change is the geometric mean over the seeds.
    """
    by_width = [
        [
            train(recipe(scheme, width, min(arguments.widths), arguments, seed), arguments.steps)
            for seed in range(arguments.seeds)
        ]
        for width in arguments.widths
    ]
    return {
        name: [
            [geometric_mean(run[name][index] for run in runs) for runs in by_width]
            for index in range(len(arguments.steps))
        ]
        for name in by_width[0][0]
    }


def recipe(scheme: str, width: int, base: int, arguments: argparse.Namespace, seed: int) -> Recipe:
    """Return a recipe of 4 layers with heads of 16 channels."""
    return Recipe.model_validate(
        {
            "run_dir": "unused",
            "model": {
                "num_layers": 4,
                "hidden_size": width,
                "attention": {"kind": arguments.kind, "head_dim": 16},
                "ffn_hidden_size": 3 * width,
                "vocab_size": VOCABULARY,
                "initialization": {
                    "scheme": scheme,
                    "base_hidden_size": base if scheme == "mup" else None,
                },
            },
            "data": {"tokenizer": "bytes", "sources": [{"path": "unused"}]},
            "training": {
                "seq_length": LENGTH,
                "global_batch_size": 1,
                "micro_batch_size": 1,
                "steps": 1000,
                "precision": "fp32",
                "seed": seed,
            },
            "optimizer": {"lr": arguments.lr},
        }
    )


def train(recipe: Recipe, steps: Sequence[int]) -> dict[str, list[float]]:
    """Train on one batch; return the root mean square of each output's change after ``steps``."""
    batch = random_batch(LENGTH, VOCABULARY)
    with (
        process_groups(recipe.parallel, recipe.training.seed) as parallel_state,
        ZeroEngine(build_model(recipe, parallel_state), recipe, parallel_state) as engine,
    ):
        step = our_step(engine, batch, recipe, parallel_state)
        first = outputs(engine.network, batch.tokens)
        found: dict[str, list[float]] = {name: [] for name in first}
        for number in range(1, max(steps) + 1):
            step()
            if number in steps:
                for name, value in outputs(engine.network, batch.tokens).items():
                    found[name].append((value - first[name]).square().mean().sqrt().item())
    return found


@torch.no_grad()
def outputs(network: Network, tokens: Tensor) -> dict[str, Tensor]:
    """Return the outputs of the last layer's parts, the final norm's input and the logits."""
    (stage,) = network.virtual_stages
    last, found = stage.decoder.layers[-1], {}
    hooks = [
        module.register_forward_hook(lambda _, __, out, name=name: found.update({name: out[0]}))
        for name, module in (
            ("attention, last layer", last.self_attention),
            ("MLP, last layer", last.mlp),
            ("input of the final norm", last),
        )
    ]
    found["logits"] = network(tokens)
    for hook in hooks:
        hook.remove()
    return {name: value.clone() for name, value in sorted(found.items())}


def write_plot(path: Path, report: dict[str, Any]) -> None:
    """Plot the changes by width: a row of axes per scheme, and a line per number of steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths, names = report["widths"], list(report["changes"]["mup"])
    figure, grid = pyplot.subplots(
        2, len(names), figsize=(11, 5.5), sharex=True, sharey="col", layout="constrained"
    )
    for row, (scheme, title) in zip(grid, SCHEMES.items(), strict=True):
        for axes, name in zip(row, names, strict=True):
            lines = zip(report["steps"], report["changes"][scheme][name], strict=True)
            for number, values in lines:
                axes.plot(widths, values, marker="o", label=f"{number} steps")
            axes.set(xscale="log", yscale="log", title=f"{title}: {name}")
            axes.title.set_size(9)
            axes.set_xticks(widths, map(str, widths))
            axes.minorticks_off()
            axes.grid(alpha=0.3)
        row[0].set_ylabel("change, root mean square")
    for axes in grid[1]:
        axes.set_xlabel("hidden size")
    grid[0][0].legend(fontsize="small")
    figure.suptitle(f"{report['kind']}, lr {report['lr']:g}, {report['seeds']} seeds", size=10)
    figure.savefig(path, dpi=110)
