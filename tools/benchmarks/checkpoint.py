"""Compare saving and loading of checkpoints with the disk's own speed, and time the guard.

    python -m tools.benchmarks checkpoint --scratch DIR --out docs/results/checkpoint_cpu.json
    python -m tools.benchmarks checkpoint --scratch DIR --layers 1 --hidden 64 --repeats 1 # a trial

All figures are from one run on one machine. Before every save, ``dd`` (with ``conv=fdatasync``)
writes a file of a checkpoint's size to the same disk, which measures the disk's own speed.
Saves are measured both while training waits and while training continues. The guard checks every
training step for loss spikes; its seconds per step are measured too.
"""

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import time
from pathlib import Path

import torch

from diffmegatron.checkpoint.checkpoint_format import Position, open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import load_recipe
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.files import HeldFolder, format_path
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.gradient_clipping import local_gradient_norms
from diffmegatron.optim.guard import Guard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.compute.agreement import agree
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import forward_backward
from diffmegatron.training.saving.resume import load_snapshot, newest_good
from diffmegatron.training.saving.saver import Saver
from tools.paths import ROOT

RECIPE = """
run_dir: {scratch}/run
model: {{num_layers: {layers}, hidden_size: {hidden}, attention: {{kind: diff_v1, num_heads: 4}},
        ffn_hidden_size: {ffn}, vocab_size: 320}}
data: {{tokenizer: bytes, sources: [{{path: {scratch}/corpus}}], validation_fraction: 0.05}}
training: {{seq_length: 256, global_batch_size: 2, micro_batch_size: 2, steps: 1000,
           precision: fp32}}
optimizer: {{lr: 1.0e-3}}
checkpoint: {{keep_last: 1}}
"""


def main(arguments: argparse.Namespace) -> None:
    """Measure everything and write the report."""
    if arguments.scratch.exists():
        raise UserError(
            f"--scratch {format_path(arguments.scratch)} exists; give the path of a new directory"
        )
    arguments.scratch.mkdir(parents=True)
    sources = ROOT / "diffmegatron"
    prepare([sources], arguments.scratch / "corpus", "bytes", pattern="*.py", show_progress=False)
    file = arguments.scratch / "bench.yaml"
    file.write_text(
        RECIPE.format(
            scratch=arguments.scratch,
            layers=arguments.layers,
            hidden=arguments.hidden,
            ffn=arguments.hidden * 8 // 3,
        )
    )
    try:
        report = measure(file, arguments)
    finally:
        shutil.rmtree(arguments.scratch)
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


def measure(file: Path, arguments: argparse.Namespace) -> dict:
    """Train, save and load with the recipe ``file``; return the report, in seconds and bytes."""
    recipe = load_recipe(file)
    run_dir = Path(recipe.run_dir)
    run_dir.mkdir()
    store = CheckpointStore(run_dir)
    with (
        HeldFolder(run_dir) as held,
        process_groups(recipe.parallel, recipe.training.seed) as parallel_state,
    ):
        network = build_model(recipe, parallel_state)
        shards = parameter_shards(network)
        engine = ZeroEngine(network, recipe, parallel_state)
        guard = Guard(recipe.guard)
        with open_loader(recipe, parallel_state, "train") as loader:
            batches = on_this_rank(next(loader), parallel_state)

            def step() -> float:
                started = time.perf_counter()
                loss = forward_backward(engine, batches, parallel_state)
                engine.step(1e-3, lambda norm: decide(guard, loss, norm, parallel_state))
                return time.perf_counter() - started

            steps = [step() for _ in range(8)][3:]
            guard_seconds = guard_cost(engine, guard, batches, parallel_state)
            before = peak_memory()
            saver = Saver(
                store, engine, shards, recipe, parallel_state, LaunchEnvironment(), None, held
            )

            def position(step: int) -> Position:
                consumed = step * recipe.training.global_batch_size
                return Position(step, step, loader.samples.state(consumed), guard.state())

            # The first save is not timed, because it allocates the host buffers. It gives the size
            # of a checkpoint.
            first = saver.save_now(position(0))
            size = int(first["ckpt/bytes"])
            training, alone, disk, slowed = [], [], [], []
            # Cloud disks slow down after a burst, so measure the disk with dd before every save.
            for number in range(1, arguments.repeats + 1):
                disk.append(dd(arguments.scratch, size))
                alone.append(saver.save_now(position(2 * number)))
                disk.append(dd(arguments.scratch, size))
                saver.start(position(2 * number + 1))
                while saver.is_writing:
                    slowed.append(step())
                training.append(saver.complete())
            after = peak_memory()
        path = store.latest()
        load = timed(
            lambda: load_snapshot(
                newest_good(store, parallel_state), engine, shards, parallel_state
            )
        )
        verify = timed(lambda: open_checkpoint(path))
    return {
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}",
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "checkpoint_bytes": size,
        "save_alone": save_figures(alone, disk[::2], size),
        "save_while_training": save_figures(training, disk[1::2], size)
        | {
            "step_seconds": statistics.median(steps),
            # A save to memory may end before the next step.
            "step_seconds_while_writing": statistics.median(slowed) if slowed else None,
        },
        "host_memory_added_bytes": after - before,
        "load_and_verify_seconds": load,
        "verify_seconds": verify,
        "guard": guard_seconds
        | {"share_of_step": guard_seconds["total_seconds"] / statistics.median(steps)},
    }


def decide(guard: Guard, loss, norm, parallel_state) -> bool:  # type: ignore[no-untyped-def]
    """All-reduce loss and norm as the trainer does; return whether the guard applies the step."""
    agreed = agree(loss, norm, parallel_state=parallel_state)
    return guard.decide(agreed.loss, agreed.gradient_norm).applied


def guard_cost(engine, guard, batches, parallel_state) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Return the median seconds that the guard adds to a step: in two parts, and their sum.

    The first part computes the norms of the gradients. The second part is the all-reduce of loss
    and norm over the ranks, and the guard's decision.
    """
    passes, rests = [], []
    device = parallel_state.device
    for _ in range(7):
        loss = forward_backward(engine, batches, parallel_state)
        passes.append(
            timed(lambda: local_gradient_norms(engine._partition, engine.network, device))
        )
        norm = torch.tensor(1.0)
        rests.append(timed(lambda: decide(guard, loss, norm, parallel_state)))  # noqa: B023
        engine.step(1e-3, lambda _: False)
    one, rest = statistics.median(passes), statistics.median(rests)
    return {
        "gradient_norms_seconds": one,
        "agreement_and_judgement_seconds": rest,
        "total_seconds": one + rest,
    }


def save_figures(saves: list[dict[str, float]], disk: list[float], size: int) -> dict:
    """Return the seconds and bytes per second of the saves, and compare the rates with ``dd``.

    Args:
        saves: metrics of each save, as the trainer logs them.
        disk: bytes per second of ``dd`` before each save.
        size: bytes of a checkpoint.
    """
    totals = [save["ckpt/total_seconds"] for save in saves]
    stalls = [save["ckpt/stall_seconds"] for save in saves]
    return {
        "total_seconds": totals,
        "stall_seconds": stalls,
        "bytes_per_second": [round(size / total) for total in totals],
        "dd_bytes_per_second": [round(rate) for rate in disk],
        "median_share_of_dd": statistics.median(
            size / total / rate for total, rate in zip(totals, disk, strict=True)
        ),
        "median_stall_share_of_total": statistics.median(
            stall / total for stall, total in zip(stalls, totals, strict=True)
        ),
    }


def dd(folder: Path, size: int) -> float:
    """Return the bytes per second at which dd writes and flushes a file of about ``size`` bytes."""
    path = folder / "dd"
    count = max(1, size >> 20)
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=1M", f"count={count}", "conv=fdatasync"]
    seconds = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    path.unlink()
    return (count << 20) / seconds


def timed(function) -> float:  # type: ignore[no-untyped-def]
    """Call a function, and return the seconds that it took."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def peak_memory() -> int:
    """Return the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
