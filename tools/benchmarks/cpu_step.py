"""Compare a training step on a CPU with a plain loop over transformers' DiffLlama.

Both train a network of 4 layers and hidden size 256 on the same random tokens, in one process and
one thread, in float32: forward, backward, clipping by the norm, AdamW. This project's step also
includes the ZeRO engine, the norm of every gradient, the all-reduce of loss and norm over the
ranks, and the guard, which decides whether the step is applied. The plain loop is
`model(labels=...)`, `backward`, `clip_grad_norm_` and torch's AdamW; it is timed once with unfused
and once with fused AdamW, so there are three kinds of step. They run in turns, each once per turn.
A ratio is a plain loop's time divided by this project's in the same turn; the median over the turns
is reported. It is above 1 if this project's step is faster. Times are CPU times of the process,
because other processes disturb them less than wall time; on an idle machine the two are equal.

    OMP_NUM_THREADS=1 python -m tools.benchmarks cpu_step
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.hf.configuration import to_hf_config
from diffmegatron.model.build import build_model
from diffmegatron.optim.guard import Guard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import ParallelState, process_groups
from diffmegatron.training.compute.agreement import agree
from diffmegatron.training.compute.step import forward_backward
from tools.benchmarks.json_report import write_json_report
from tools.benchmarks.machine import describe_machine

Step = Callable[[], float]


def main(arguments: argparse.Namespace) -> None:
    """Measure, print and write the report."""
    torch.set_num_threads(1)
    rows = [
        measure(length, arguments.vocabulary, arguments.seconds) for length in arguments.lengths
    ]
    report = {
        "command": "OMP_NUM_THREADS=1 python -m tools.benchmarks cpu_step",
        "machine": describe_machine("cpu") | {"transformers": metadata.version("transformers")},
        "vocabulary": arguments.vocabulary,
        "lengths": rows,
    }
    write_json_report(arguments.out, report)
    for row in rows:
        print(json.dumps(row))


def measure(length: int, vocabulary: int, seconds: float) -> dict[str, Any]:
    """Time the three kinds of step at one sequence length.

    Returns:
        The median tokens per second of each kind, and the median ratios of the two plain loops'
        times to this project's.
    """
    recipe = small_recipe(length, vocabulary)
    with (
        process_groups(recipe.parallel, recipe.training.seed) as parallel_state,
        ZeroEngine(build_model(recipe, parallel_state), recipe, parallel_state) as engine,
    ):
        batch = random_batch(length, vocabulary)
        steps = {
            "ours": our_step(engine, batch, recipe, parallel_state),
            "plain": plain_step(batch, recipe, fused=False),
            "plain, fused AdamW": plain_step(batch, recipe, fused=True),
        }
        taken = by_turns(steps, seconds)
    return {
        "tokens": length,
        "turns": len(taken["ours"]),
        "tokens_per_second": {
            name: round(length / statistics.median(times)) for name, times in taken.items()
        },
        "ratio": {name: ratio(taken[name], taken["ours"]) for name in steps if name != "ours"},
    }


def ratio(theirs: list[float], ours: list[float]) -> float:
    """Return the median over the turns of their time divided by ours; above 1, ours is faster."""
    return round(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)), 3)


def by_turns(steps: dict[str, Step], seconds: float) -> dict[str, list[float]]:
    """Run the steps in turns; return, for each step, a list of the CPU seconds of its runs.

    Args:
        steps: functions to time, by name. Before the measurement each runs three times as warm-up.
        seconds: CPU seconds of the measurement, of all steps together.
    """
    taken: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for _ in range(3):
        for name in order:
            steps[name]()
    end = time.process_time() + seconds
    while time.process_time() < end:
        for name in order:
            start = time.process_time()
            steps[name]()
            taken[name].append(time.process_time() - start)
        order = order[1:] + order[:1]
    return taken


def small_recipe(length: int, vocabulary: int) -> Recipe:
    """Return a recipe of 4 layers, hidden size 256 and 4 differential heads of 32 channels."""
    return Recipe.model_validate(
        {
            "run_dir": "unused",
            "model": {
                "num_layers": 4,
                "hidden_size": 256,
                "attention": {"kind": "diff_v1", "num_heads": 4, "head_dim": 32},
                "ffn_hidden_size": 704,
                "vocab_size": vocabulary,
            },
            "data": {"tokenizer": "bytes", "sources": [{"path": "unused"}]},
            "training": {
                "seq_length": length,
                "global_batch_size": 1,
                "micro_batch_size": 1,
                "steps": 1000,
                "precision": "fp32",
            },
            "optimizer": {"lr": 1e-4},
        }
    )


def random_batch(length: int, vocabulary: int) -> Batch:
    """Return one sequence of random tokens, all of which count in the loss."""
    tokens = torch.randint(
        0, vocabulary, (1, length + 1), generator=torch.Generator().manual_seed(0)
    )
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=torch.ones(1, length),
    )


def our_step(
    engine: ZeroEngine, batch: Batch, recipe: Recipe, parallel_state: ParallelState
) -> Step:
    """Return a function that runs the trainer's step on a batch and returns the loss."""
    guard = Guard(recipe.guard)

    def step() -> float:
        loss, agreed_loss = forward_backward(engine, [batch], parallel_state), math.nan

        def should_apply(norm: Tensor) -> bool:
            nonlocal agreed_loss
            agreed = agree(loss, norm, parallel_state=parallel_state)
            agreed_loss = agreed.loss
            return guard.decide(agreed.loss, agreed.gradient_norm).applied

        engine.step(recipe.optimizer.lr, should_apply)
        return agreed_loss

    return step


def plain_step(batch: Batch, recipe: Recipe, *, fused: bool) -> Step:
    """Return a function that trains `transformers`' DiffLlama for a step and returns the loss."""
    optimizer_config = recipe.optimizer
    model = AutoModelForCausalLM.from_config(to_hf_config(recipe, 0, torch.float32))
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=optimizer_config.lr,
        betas=optimizer_config.betas,
        eps=optimizer_config.eps,
        weight_decay=optimizer_config.weight_decay,
        fused=fused,
    )

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        # The loss is computed from shift_labels, which must be shifted already. Without the
        # argument labels, the model would compute no loss.
        loss = model(batch.tokens, labels=batch.tokens, shift_labels=batch.labels, use_cache=False)
        loss.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer_config.clip_grad_norm)
        optimizer.step()
        return float(loss.loss.detach())

    return step
