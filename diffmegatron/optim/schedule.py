"""Learning-rate schedule: a function of the step, so checkpoints need no state for it."""

import math

from diffmegatron.config.optimizer_config import OptimizerConfig


def learning_rate(step: int, total_steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of training step ``step``, counted from 1.

    It rises linearly to ``lr`` during the warm-up. Then it depends on ``schedule.kind``:

    - ``constant``: it stays at ``lr``.
    - ``linear`` and ``cosine``: it falls to ``final_lr``, linearly or as half a cosine.
    - ``wsd``: it stays at ``lr``, and falls linearly to ``final_lr`` in the last ``decay`` steps.
    """
    schedule = optimizer.schedule
    warmup = schedule.warmup(total_steps)
    if step <= warmup:
        return optimizer.lr * step / warmup
    if schedule.kind == "constant":
        return optimizer.lr
    start = decay_start(total_steps, optimizer)
    progress = (step - start) / (total_steps - start)
    remaining = 1.0 - min(max(progress, 0.0), 1.0)
    if schedule.kind == "cosine":
        remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return schedule.final_lr + (optimizer.lr - schedule.final_lr) * remaining


def decay_start(total_steps: int, optimizer: OptimizerConfig) -> int:
    """Return the last step before the decay; ``total_steps`` for the kind ``constant``."""
    schedule = optimizer.schedule
    if schedule.kind == "constant":
        return total_steps
    if schedule.kind == "wsd":
        return total_steps - schedule.decay(total_steps)
    return schedule.warmup(total_steps)
