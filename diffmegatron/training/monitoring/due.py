"""Selection of the evaluators that are due at a step (this module does not import torch).

An evaluator measures a held-out loss or an evaluation suite during training.
"""

from pathlib import Path

from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.training.monitoring.metrics import newest_entries

HELD_OUT = "valid/loss"
TEST = "test/loss"


def suite_evaluator_name(suite: str) -> str:
    """Return the name of the evaluator of a suite, such as ``eval/recall``.

    The names of the suite's metrics begin with this name and ``/``.
    """
    return f"eval/{suite}"


def due_at(recipe: Recipe, step: int) -> list[str]:
    """Return the names of the evaluators that are due at a step.

    All evaluators are due at the last step. The suites of ``training.evaluate`` and the held-out
    loss are also due at step 0 and at multiples of their interval. The held-out and test losses are
    left out if ``training.eval_batches`` or the fraction of their split is 0.
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

    Only the last entries of ``metrics.jsonl`` are read, so ``step`` must be the newest step there.

    Args:
        run_dir: directory of the run. It may differ from ``recipe.run_dir`` if it was moved.
    """
    try:
        entries = newest_entries(run_dir)
    except UserError:
        # The file cannot be read. When the run starts, it renames the file and begins a new one, so
        # no value is recorded.
        entries = []
    recorded = [name for entry in entries if entry["step"] == step for name in entry]
    return [
        evaluator
        for evaluator in due_at(recipe, step)
        if not any(name == evaluator or name.startswith(f"{evaluator}/") for name in recorded)
    ]
