"""Steps at which each measurement of a run is due, and those not recorded yet (no torch)."""

from pathlib import Path

from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.training.monitoring.metrics import newest_entries

HELD_OUT = "valid/loss"
TEST = "test/loss"


def suite_evaluator_name(suite: str) -> str:
    """Return the name of a suite's evaluator, which is the prefix of its metrics' names."""
    return f"eval/{suite}"


def due_at(recipe: Recipe, step: int) -> list[str]:
    """Return the names of the evaluators that are due at a step.

    Each is due at step 0, at multiples of its interval and at the last step. The loss on the test
    documents is due at the last step only.
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
    """Return the names of the evaluators due at a step without a value in ``metrics.jsonl``.

    Args:
        recipe: recipe of the run.
        step: newest step in ``metrics.jsonl``.
        run_dir: present directory of the run, which may have been moved.
    """
    try:
        entries = newest_entries(run_dir)
    except UserError:  # Nothing can be read. The run sets such a file aside when it starts.
        entries = []
    recorded = [name for entry in entries if entry["step"] == step for name in entry]
    return [
        evaluator
        for evaluator in due_at(recipe, step)
        if not any(name == evaluator or name.startswith(f"{evaluator}/") for name in recorded)
    ]
