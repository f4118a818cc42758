"""The learning rate at the points that define it."""

import math

import pytest

from diffmegatron.config.schema import OptimizerConfig, Schedule
from diffmegatron.optim.schedule import learning_rate


def optimizer(kind: str, warmup: int = 10) -> OptimizerConfig:
    return OptimizerConfig(
        lr=1e-3, schedule=Schedule(kind=kind, warmup_steps=warmup, final_lr=1e-4)
    )


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant"])
def test_warmup_is_linear_and_ends_at_the_peak(kind):
    rates = [learning_rate(step, 100, optimizer(kind)) for step in range(1, 11)]
    assert rates == pytest.approx([1e-4 * step for step in range(1, 11)])


@pytest.mark.parametrize(
    ("kind", "middle", "last"),
    [("linear", 5.5e-4, 1e-4), ("cosine", 5.5e-4, 1e-4), ("constant", 1e-3, 1e-3)],
)
def test_decay_passes_the_middle_and_ends_at_the_final_rate(kind, middle, last):
    assert learning_rate(55, 100, optimizer(kind)) == pytest.approx(middle)
    assert learning_rate(100, 100, optimizer(kind)) == pytest.approx(last)
    assert learning_rate(150, 100, optimizer(kind)) == pytest.approx(last)


def test_cosine_is_half_a_cosine():
    progress = (32 - 10) / 90
    expected = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * progress))
    assert learning_rate(32, 100, optimizer("cosine")) == pytest.approx(expected)


def test_without_warmup_the_first_step_is_past_the_peak():
    assert learning_rate(1, 100, optimizer("linear", warmup=0)) == pytest.approx(1e-3 - 9e-6)
