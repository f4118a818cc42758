"""Time whole layers of both twins side by side: forward and backward tokens/s, peak memory.

A stack of a few layers of the recipe's shape is built for the differential model and for its
Transformer; their repetitions alternate, so that a machine that slows down slows both. Embedding
and output layer are part of what is timed, as in a training step, with one vocabulary for both.
Two depths give the time per layer, and from it the estimated ratio at the recipe's full depth.
Writes NAME.json and NAME.md to benchmarks/results/.

    # on a GPU: the 3B shape at 4K, in batches that keep it busy
    python tools/bench_layer.py training.attention_backend=triton training.micro_batch_size=4
    python tools/bench_layer.py --small                             # a CPU: narrower, 1K, float32
"""

import argparse
import json
import os
import platform
import statistics
from pathlib import Path

import torch
from timing import RESULTS, timed

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.model.build import build_model
from diffmegatron.parallel.topology import Topology, process_groups

ROOT = Path(__file__).resolve().parent.parent
TWINS = ("differential", "softmax")
SMALL = [
    "model.hidden_size=768",
    "model.num_heads=6",
    "model.head_dim=64",
    "model.ffn_hidden_size=2048",
    "model.vocab_size=1024",
    "training.seq_length=1024",
    "training.precision=fp32",
]


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default=str(ROOT / "configs/diff_3b_1t.yaml"))
    parser.add_argument("--layers", type=int, nargs=2, default=[2, 4], help="the two depths")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="narrower, for a CPU")
    parser.add_argument("--name", default="layer", help="of the files written")
    parser.add_argument("overrides", nargs="*", help="of the recipe, KEY=VALUE")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write."""
    arguments = parse_arguments()
    overrides = [*(SMALL if arguments.small else []), *arguments.overrides]
    full = load_recipe(arguments.recipe, overrides)
    measured = {layers: measure(full, layers, arguments.repetitions) for layers in arguments.layers}
    report = describe(full, arguments.layers, measured)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{arguments.name}.json").write_text(json.dumps(report, indent=1) + "\n")
    table = markdown(report)
    (RESULTS / f"{arguments.name}.md").write_text(table)
    print(table)


def measure(full: Recipe, layers: int, repetitions: int) -> dict[str, dict]:
    """Median seconds of forward plus backward, and peak memory, of each twin at one depth."""
    seconds: dict[str, list[float]] = {twin: [] for twin in TWINS}
    memory: dict[str, int | None] = {}
    with process_groups(full.parallel, full.training.seed) as topology:
        steps = {}
        for twin in TWINS:
            held_by_the_other = (
                torch.cuda.memory_allocated() if topology.device.type == "cuda" else 0
            )
            steps[twin] = prepare(twin_of(full, twin, layers), topology)
            peak = peak_memory(steps[twin], topology)
            memory[twin] = None if peak is None else peak - held_by_the_other
        for _ in range(repetitions):
            for twin, step in steps.items():
                elapsed, _ = timed(step, topology.device.type)
                seconds[twin].append(elapsed)
    return {
        twin: {"seconds": statistics.median(seconds[twin]), "peak_bytes": memory[twin]}
        for twin in TWINS
    }


def twin_of(full: Recipe, twin: str, layers: int) -> Recipe:
    """The recipe's shape with a few layers, as one of the pair."""
    model = full.model.model_copy(update={"attention": twin, "num_layers": layers})
    return full.model_copy(update={"model": model})


def prepare(recipe: Recipe, topology: Topology):  # type: ignore[no-untyped-def]
    """A function that runs one forward and backward pass on random tokens."""
    network = build_model(recipe, topology)
    training = recipe.training
    shape = (training.micro_batch_size, training.seq_length + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, recipe.model.vocab_size, shape, generator=generator)
    tokens = tokens.to(topology.device)
    positions = torch.arange(training.seq_length, device=topology.device).expand(shape[0], -1)

    def step() -> None:
        network.zero_grad(set_to_none=True)
        losses = network(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
        losses.float().mean().backward()

    return step


def peak_memory(step, topology: Topology) -> int | None:  # type: ignore[no-untyped-def]
    """Bytes at the peak of a step on the device; None on a CPU, where only the process is known."""
    step()
    if topology.device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def describe(full: Recipe, layers: list[int], measured: dict) -> dict:
    """The report: what was measured, the ratios, and the estimate at full depth."""
    few, many = layers
    tokens = full.training.micro_batch_size * full.training.seq_length
    at_full_depth = {}
    for twin in TWINS:
        low, high = measured[few][twin]["seconds"], measured[many][twin]["seconds"]
        per_layer = (high - low) / (many - few)
        at_full_depth[twin] = high + per_layer * (full.model.num_layers - many)
    on_gpu = torch.cuda.is_available()
    return {
        "machine": {
            "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "shape": full.model.model_dump(mode="json"),
        "seq_length": full.training.seq_length,
        "precision": full.training.precision,
        "measured": {
            str(depth): {
                twin: {**values, "tokens_per_second": tokens / values["seconds"]}
                for twin, values in twins.items()
            }
            for depth, twins in measured.items()
        },
        "ratio_of_throughput": {
            str(depth): twins["softmax"]["seconds"] / twins["differential"]["seconds"]
            for depth, twins in measured.items()
        },
        "estimated_ratio_at_full_depth": at_full_depth["softmax"] / at_full_depth["differential"],
    }


def markdown(report: dict) -> str:
    """The report as a table."""
    lines = [
        f"{report['machine']['device']}, {report['precision']}, sequence {report['seq_length']}, "
        f"hidden {report['shape']['hidden_size']}, {report['machine']['threads']} threads",
        "",
        "| layers | Diff tokens/s | Transformer tokens/s | Diff / Transformer | peak memory |",
        "|---|---|---|---|---|",
    ]
    for depth, twins in report["measured"].items():
        speeds = [f"{twins[twin]['tokens_per_second']:.0f}" for twin in TWINS]
        ratio = report["ratio_of_throughput"][depth]
        memory = [twins[twin]["peak_bytes"] for twin in TWINS]
        peak = f"{memory[0] / memory[1]:.3f}" if all(memory) else "on a GPU only"
        lines.append(f"| {depth} | {speeds[0]} | {speeds[1]} | {ratio:.3f} | {peak} |")
    estimate = report["estimated_ratio_at_full_depth"]
    layers = report["shape"]["num_layers"]
    lines += ["", f"Estimated at {layers} layers: {estimate:.3f}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
