"""Selection of the evaluators (held-out losses, suites) that are due at a step.

This module does not import torch.
"""

from pathlib import Path

from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.training.monitoring.metrics import newest_entries

HELD_OUT = "valid/loss"
TEST = "test/loss"


def suite_evaluator_name(suite: str) -> str:
    """Return the name of a suite's evaluator, such as ``eval/recall``."""
    return f"eval/{suite}"


def due_at(recipe: Recipe, step: int) -> list[str]:
    """Return the names of the evaluators that are due at a step.

    Suites and the validation loss are due at multiples of their interval and at the last step. The
    test loss is due only at the last step. A loss is never due if ``training.eval_batches`` or the
    fraction of its split is 0.
    """
    training = recipe.training
    is_last = step >= training.total_steps
    interval = {suite_evaluator_name(entry.suite): entry.every for entry in training.evaluate}
    if training.eval_batches and recipe.data.validation_fraction:
        interval[HELD_OUT] = training.eval_interval
    names = [name for name, every in interval.items() if is_last or step % every == 0]
    if is_last and training.eval_batches and recipe.data.test_fraction:
        names.append(TEST)
    return names


def unrecorded_at(recipe: Recipe, step: int, run_dir: Path) -> list[str]:
    """Return the names of the evaluators that are due at a step but have no recorded value.

    Only the last entries of ``run_dir/metrics.jsonl`` are read, so ``step`` must be the newest step
    in this file.
    """
    try:
        entries = newest_entries(run_dir)
    except UserError:
        entries = []  # When the run starts, it renames an unreadable file and begins a new one.
    recorded = [name for entry in entries if entry["step"] == step for name in entry]
    return [
        evaluator
        for evaluator in due_at(recipe, step)
        if not any(name == evaluator or name.startswith(f"{evaluator}/") for name in recorded)
    ]
