"""Time whole layers of several kinds of attention: forward and backward tokens/s, peak memory.

Networks with a few layers of the recipe's shape are built: one for each requested kind of attention
(by default, that of the recipe), and one Transformer baseline of equal size. The repetitions of all
networks alternate, so that a machine that slows down affects all of them. The time includes the
embedding and the output layer, as in a training step; all networks have the same vocabulary. Every
network is measured with two numbers of layers. The difference gives the time per layer, from which
its throughput at the recipe's full depth, relative to the Transformer's, is estimated. Writes
NAME.json and NAME.md to docs/results/.

    # on a GPU: the 3B shape with sequences of 4K, in batches that keep the GPU busy
    python -m tools.benchmarks layer training.attention_backend=triton training.micro_batch_size=4
    python -m tools.benchmarks layer --attention diff_v1 --attention diff_v2 --attention grouped
    # on a CPU: a narrower network with sequences of 1K in float32
    python -m tools.benchmarks layer --small
"""

import argparse
import os
import platform
import statistics

import torch

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.model.build import build_model
from diffmegatron.parallel.parallel_state import ParallelState, process_groups
from diffmegatron.tuning.timing import timed
from tools.benchmarks.json_report import write_json_report
from tools.paths import RESULTS

BASELINE = "Transformer"
SMALL = [
    "model.hidden_size=768",
    "model.attention.head_dim=64",
    "model.ffn_hidden_size=2048",
    "model.vocab_size=1024",
    "training.seq_length=1024",
    "training.precision=fp32",
]


def main(arguments: argparse.Namespace) -> None:
    """Measure, print and write the report."""
    models = recipes(arguments)
    measured = {
        layers: measure(models, layers, arguments.repetitions) for layers in arguments.layers
    }
    report = describe(models, arguments.layers, measured)
    write_json_report(RESULTS / f"{arguments.name}.json", report)
    table = markdown(report)
    (RESULTS / f"{arguments.name}.md").write_text(table)
    print(table)


def recipes(arguments: argparse.Namespace) -> dict[str, Recipe]:
    """Return a dict of the recipes to measure: each kind of attention, then the Transformer."""
    overrides = [*(SMALL if arguments.small else []), *arguments.overrides]

    def load(*more: str) -> Recipe:
        return load_recipe(arguments.recipe, [*overrides, *more])

    found = {}
    for choice in arguments.attention or [load().model.attention.kind]:
        kind, *keys = choice.split(",")
        found[choice] = load(
            f"model.attention.kind={kind}", *(f"model.attention.{key}" for key in keys)
        )
    return found | {BASELINE: load("model.baseline=true")}


def measure(models: dict[str, Recipe], layers: int, repetitions: int) -> dict[str, dict]:
    """Measure forward plus backward of each model, reduced to ``layers`` layers.

    Returns:
        For each model, the median seconds, and the peak bytes (None on a CPU).
    """
    seconds: dict[str, list[float]] = {name: [] for name in models}
    memory: dict[str, int | None] = {}
    training = models[BASELINE].training
    with process_groups(models[BASELINE].parallel, training.seed) as parallel_state:
        steps = {}
        for name, recipe in models.items():
            held_by_others = (
                torch.cuda.memory_allocated() if parallel_state.device.type == "cuda" else 0
            )
            steps[name] = prepare(shortened(recipe, layers), parallel_state)
            peak = peak_memory(steps[name], parallel_state)
            memory[name] = None if peak is None else peak - held_by_others
        for _ in range(repetitions):
            for name, step in steps.items():
                elapsed, _ = timed(step, parallel_state.device.type)
                seconds[name].append(elapsed)
    return {
        name: {"seconds": statistics.median(seconds[name]), "peak_bytes": memory[name]}
        for name in models
    }


def shortened(recipe: Recipe, layers: int) -> Recipe:
    """Return the recipe with fewer layers."""
    model = recipe.model.model_copy(update={"num_layers": layers})
    return recipe.model_copy(update={"model": model})


def prepare(recipe: Recipe, parallel_state: ParallelState):  # type: ignore[no-untyped-def]
    """Return a function that runs one forward and backward pass on random tokens."""
    network = build_model(recipe, parallel_state)
    training = recipe.training
    shape = (training.micro_batch_size, training.seq_length + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, recipe.model.vocab_size, shape, generator=generator)
    tokens = tokens.to(parallel_state.device)

    def step() -> None:
        network.zero_grad(set_to_none=True)
        losses = network(tokens[:, :-1], labels=tokens[:, 1:])
        losses.float().mean().backward()

    return step


def peak_memory(step, parallel_state: ParallelState) -> int | None:  # type: ignore[no-untyped-def]
    """Return the device's peak bytes during a step; None on a CPU, which has no such counter."""
    step()
    if parallel_state.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def describe(models: dict[str, Recipe], layers: list[int], measured: dict) -> dict:
    """Return the report with measurements, ratios and the estimate at full depth.

    Args:
        models: recipes by name.
        layers: the two measured numbers of layers, the smaller one first.
        measured: results of :func:`measure` by number of layers.
    """
    few, many = layers
    full = models[BASELINE]
    tokens = full.training.micro_batch_size * full.training.seq_length
    at_full_depth = {}
    for name in models:
        low, high = measured[few][name]["seconds"], measured[many][name]["seconds"]
        per_layer = (high - low) / (many - few)
        at_full_depth[name] = high + per_layer * (full.model.num_layers - many)
    on_gpu = torch.cuda.is_available()
    return {
        "machine": {
            "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "shape": {
            **full.model.model_dump(mode="json", exclude={"attention"}),
            "attention": {
                name: recipe.model.attention.model_dump(mode="json")
                for name, recipe in models.items()
            },
        },
        "seq_length": full.training.seq_length,
        "precision": full.training.precision,
        "measured": {
            str(depth): {
                name: {
                    **values,
                    "tokens_per_second": tokens / values["seconds"],
                    "ratio_of_throughput": of_all[BASELINE]["seconds"] / values["seconds"],
                }
                for name, values in of_all.items()
            }
            for depth, of_all in measured.items()
        },
        "estimated_ratio_at_full_depth": {
            name: at_full_depth[BASELINE] / seconds for name, seconds in at_full_depth.items()
        },
    }


def markdown(report: dict) -> str:
    """Return the report as a Markdown table."""
    lines = [
        f"{report['machine']['device']}, {report['precision']}, sequence {report['seq_length']}, "
        f"hidden {report['shape']['hidden_size']}, {report['machine']['threads']} threads",
        "",
        "| layers | attention | tokens/s | of the Transformer's | peak memory, of its |",
        "|---|---|---|---|---|",
    ]
    for depth, of_all in report["measured"].items():
        for name, values in of_all.items():
            own, baseline = values["peak_bytes"], of_all[BASELINE]["peak_bytes"]
            peak = f"{own / baseline:.3f}" if own and baseline else "on a GPU only"
            speed, ratio = values["tokens_per_second"], values["ratio_of_throughput"]
            lines.append(f"| {depth} | {name} | {speed:.0f} | {ratio:.3f} | {peak} |")
    estimates = ", ".join(
        f"{name} {ratio:.3f}" for name, ratio in report["estimated_ratio_at_full_depth"].items()
    )
    lines += ["", f"Estimated at {report['shape']['num_layers']} layers: {estimates}."]
    return "\n".join(lines) + "\n"
