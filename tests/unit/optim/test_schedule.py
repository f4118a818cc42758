"""The learning rate of each kind of schedule, at the steps that define the schedule."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffmegatron.config.optimizer_config import MuonConfig, OptimizerConfig, Schedule
from diffmegatron.config.schema import Recipe
from diffmegatron.config.training_config import TrainingConfig
from diffmegatron.optim.schedule import learning_rate
from diffmegatron.training.saving.resume import learning_rate_rise


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


def wsd(**lengths: float) -> OptimizerConfig:
    return OptimizerConfig(lr=1e-3, schedule=Schedule(kind="wsd", final_lr=1e-4, **lengths))


@pytest.mark.parametrize("decay", [{"decay_steps": 20}, {"decay_ratio": 0.2}])
@pytest.mark.parametrize("warmup", [{"warmup_steps": 10}, {"warmup_ratio": 0.1}])
def test_wsd_rises_stays_and_falls(warmup, decay):
    rates = {step: learning_rate(step, 100, wsd(**warmup, **decay)) for step in range(1, 121)}
    assert [rates[step] for step in (1, 5, 10)] == pytest.approx([1e-4, 5e-4, 1e-3])
    assert {rates[step] for step in range(10, 81)} == {1e-3}
    assert [rates[step] for step in (81, 90, 100, 120)] == pytest.approx(
        [1e-3 - 4.5e-5, 5.5e-4, 1e-4, 1e-4]
    )


def test_a_longer_wsd_run_is_the_same_until_the_shorter_one_decays():
    schedule = wsd(warmup_steps=10, decay_steps=20)
    short, long = (
        [learning_rate(step, total, schedule) for step in range(1, 201)] for total in (100, 200)
    )
    assert short[:80] == long[:80]
    assert short[80] < long[80]


@pytest.mark.parametrize(("ratio", "steps"), [(0.03, 3), (0.0, 0), (0.006, 1), (0.555, 56)])
def test_a_ratio_of_warmup_is_the_nearest_number_of_steps(ratio, steps):
    assert Schedule(warmup_ratio=ratio).warmup(100) == steps


def recipe(steps: int, **schedule: object) -> Recipe:
    optimizer = OptimizerConfig(lr=1e-3, schedule=Schedule(final_lr=3e-4, **schedule))
    return Recipe.model_construct(
        training=TrainingConfig.model_construct(steps=steps), optimizer=optimizer
    )


@given(
    steps=st.integers(20, 200),
    longer=st.integers(0, 200),
    warmup=st.sampled_from([0, 5]),
    kind=st.sampled_from(["linear", "cosine", "constant", "wsd"]),
    data=st.data(),
)
def test_a_warning_precedes_every_rise_after_the_decay_has_begun(steps, longer, warmup, kind, data):
    """Compare with the learning rates of all steps of the shorter and the longer run."""
    decay = {"decay_ratio": 0.3} if kind == "wsd" else {}
    schedule = {"kind": kind, "warmup_steps": warmup, **decay}
    before, now = recipe(steps, **schedule), recipe(steps + longer, **schedule)
    step = data.draw(st.integers(0, steps))
    # Without warm-up, the rate before the first step is the peak.
    rates = [1e-3] * (warmup == 0)
    rates += [learning_rate(n, steps, before.optimizer) for n in range(1, step + 1)]
    has_decayed = step > warmup and rates[-1] < max(rates)
    rises = (
        has_decayed
        and step < steps + longer
        and (learning_rate(step + 1, steps + longer, now.optimizer) > rates[-1])
    )
    warning = learning_rate_rise(before, now, step)
    assert (warning is not None) == rises
    if warning is not None:
        first = 0 if warmup == 0 else 1
        last_at_peak = max(n for n, rate in enumerate(rates, first) if rate == max(rates))
        assert f"had begun after step {last_at_peak};" in warning


@pytest.mark.parametrize(("lr", "rises"), [(0.02, False), (0.05, True)])
def test_a_higher_rate_of_muon_alone_is_a_rise(lr, rises):
    def of_muon(lr: float) -> Recipe:
        plain = recipe(100, kind="linear", warmup_steps=5)
        update = {"kind": "muon", "muon": MuonConfig(lr=lr)}
        return plain.model_copy(update={"optimizer": plain.optimizer.model_copy(update=update)})

    warning = learning_rate_rise(of_muon(0.02), of_muon(lr), 50)
    assert (warning is not None) == rises
