"""The learning rate as a function of the step alone, so that a resumed run needs no state."""

import math

from diffmegatron.config.schema import OptimizerConfig


def learning_rate(step: int, total_steps: int, optimizer: OptimizerConfig) -> float:
    """Learning rate of the ``step``-th update (from 1) of ``total_steps``.

    Rises linearly to ``lr`` over the warm-up, then falls (linear or half a cosine) so that the
    last update has ``final_lr``; after the last step it stays there.
    """
    schedule = optimizer.schedule
    if step <= schedule.warmup_steps:
        return optimizer.lr * step / schedule.warmup_steps
    if schedule.kind == "constant":
        return optimizer.lr
    progress = (step - schedule.warmup_steps) / (total_steps - schedule.warmup_steps)
    remaining = 1.0 - min(progress, 1.0)
    if schedule.kind == "cosine":
        remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return schedule.final_lr + (optimizer.lr - schedule.final_lr) * remaining
