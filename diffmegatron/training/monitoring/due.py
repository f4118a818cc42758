"""When each measurement of a run is due, and which of them are recorded. Needs no torch."""

from pathlib import Path

from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.training.monitoring.metrics import newest_entries

HELD_OUT = "valid/loss"
TEST = "test/loss"


def suite_evaluator_name(suite: str) -> str:
    """Return the name of a suite's evaluator, with which the names of its metrics begin."""
    return f"eval/{suite}"


def due_at(recipe: Recipe, step: int) -> list[str]:
    """Return the names of the evaluators whose values belong to a step.

    Each is due at step 0, at the multiples of its interval and at the last step; the loss of the
    test documents at the last step alone.
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
    """Return the names of the evaluators due at a step without a value of it in ``metrics.jsonl``.

    Args:
        recipe: of the run.
        step: the newest one that ``metrics.jsonl`` has entries of.
        run_dir: where the run is; it may have been moved.
    """
    try:
        entries = newest_entries(run_dir)
    except UserError:  # Nothing is recorded in it. A run sets it aside when it opens its metrics.
        entries = []
    recorded = [name for entry in entries if entry["step"] == step for name in entry]
    return [
        evaluator
        for evaluator in due_at(recipe, step)
        if not any(name == evaluator or name.startswith(f"{evaluator}/") for name in recorded)
    ]
