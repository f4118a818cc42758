"""Learning rate as a function of the step only, so that a resumed run needs no state."""

import math

from diffmegatron.config.optimizer_config import OptimizerConfig


def learning_rate(step: int, total_steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of the ``step``-th update (from 1) of ``total_steps``.

    It rises linearly to ``lr`` during the warm-up. It then falls to ``final_lr`` at the last update
    (linear, half a cosine, or ``wsd``: constant and then linear over its decay), and stays there.
    """
    schedule = optimizer.schedule
    warmup = schedule.warmup(total_steps)
    if step <= warmup:
        return optimizer.lr * step / warmup
    if schedule.kind == "constant":
        return optimizer.lr
    falls = schedule.decay(total_steps) if schedule.kind == "wsd" else total_steps - warmup
    progress = (step - (total_steps - falls)) / falls
    remaining = 1.0 - min(max(progress, 0.0), 1.0)
    if schedule.kind == "cosine":
        remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return schedule.final_lr + (optimizer.lr - schedule.final_lr) * remaining
