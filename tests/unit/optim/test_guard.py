"""The guard's decisions on the loss and norm of a step: apply, skip, roll back or stop."""

import json
import math

import pytest

from diffmegatron.config.recovery_config import GuardConfig
from diffmegatron.optim.guard import Action, Guard

CALM = [(2.0 + 0.01 * (n % 7), 1.0 + 0.02 * (n % 5)) for n in range(16)]


def guard_after(values=CALM, **config) -> Guard:
    guard = Guard(GuardConfig(**({"window": 16, "sigma": 6.0} | config)))
    for loss, norm in values:
        assert guard.decide(loss, norm).applied
    return guard


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["loss", "gradient norm"])
@pytest.mark.parametrize("spikes", ["ignore", "record", "skip"])
def test_a_non_finite_step_is_never_applied(value, which, spikes):
    loss, norm = (value, 1.0) if which == "loss" else (2.0, value)
    decision = guard_after(spikes=spikes).decide(loss, norm)
    assert not decision.applied
    assert decision.reason.startswith(f"{which} is")


def test_a_step_with_deepspeeds_norm_of_minus_one_is_not_applied():
    assert not guard_after().decide(2.0, -1.0).applied


@pytest.mark.parametrize(
    ("spikes", "applied", "reported"),
    [("ignore", True, False), ("record", True, True), ("skip", False, True)],
)
@pytest.mark.parametrize(("loss", "norm"), [(3.0, 1.02), (2.02, 5.0)])
def test_a_spike_is_ignored_recorded_or_skipped(spikes, applied, reported, loss, norm):
    guard = guard_after(spikes=spikes)
    decision = guard.decide(loss, norm)
    assert decision.applied == applied
    assert ("standard deviations above the mean" in (decision.reason or "")) == reported
    assert guard.metrics()["guard/spikes"] == reported


def test_a_spike_is_k_sample_standard_deviations_above_the_mean():
    """Compare the limit of a spike with numpy's mean and standard deviation.

    A decrease of loss and norm is not a spike, however large the decrease is.
    """
    numpy = pytest.importorskip("numpy")
    losses = [loss for loss, _ in CALM]
    edge = numpy.mean(losses) + 6 * numpy.std(losses, ddof=1)
    assert guard_after(spikes="skip").decide(edge - 1e-6, 1.0).applied
    assert not guard_after(spikes="skip").decide(edge + 1e-6, 1.0).applied
    assert guard_after(spikes="skip").decide(0.1, 0.1).applied


def test_rounding_after_constant_steps_is_not_a_spike():
    guard = guard_after([(2.0, 1.0)] * 16, spikes="skip")
    assert guard.decide(2.01, 1.0 + 1e-6).applied
    assert not guard.decide(2.2, 1.0).applied


def test_spikes_are_detected_once_half_the_window_is_full():
    assert guard_after(CALM[:7], spikes="skip").decide(100.0, 100.0).applied
    assert not guard_after(CALM[:8], spikes="skip").decide(100.0, 100.0).applied


def test_skipped_steps_do_not_enter_the_window():
    guard = guard_after(spikes="skip", patience=9)
    assert [guard.decide(3.0, 1.0).applied for _ in range(8)] == [False] * 8


@pytest.mark.parametrize(
    ("then", "action"), [("rollback", Action.ROLL_BACK), ("stop", Action.STOP)]
)
def test_patience_ends_after_steps_in_a_row(then, action):
    guard = guard_after(then=then, patience=3)
    for values in [(math.nan, 1.0), (math.nan, 1.0), (2.0, 1.0), (math.nan, 1.0), (math.nan, 1.0)]:
        assert guard.decide(*values).action is Action.CONTINUE
    assert guard.decide(math.nan, 1.0).action is action
    assert guard.metrics()["guard/skipped_steps"] == 5


def test_rollbacks_are_limited_and_counted_across_rollbacks():
    guard = guard_after(patience=1, max_rollbacks=2)
    saved = guard.state()
    for _ in range(2):
        assert guard.decide(math.nan, 1.0).action is Action.ROLL_BACK
        guard.rolled_back(saved)
        assert guard.decide(2.0, 1.0).applied
    assert guard.decide(math.nan, 1.0).action is Action.STOP
    assert guard.metrics() == {
        "guard/skipped_steps": 3,
        "guard/spikes": 0,
        "guard/rollbacks": 2,
        "guard/steps_without_labels": 0,
    }


def test_a_restored_guard_judges_as_the_one_saved():
    guard = guard_after(spikes="skip")
    guard.decide(math.nan, 1.0)
    other = Guard(GuardConfig(window=16, sigma=6.0, spikes="skip"))
    other.restore(json.loads(json.dumps(guard.state())))
    assert other.state() == guard.state()
    for values in [(3.0, 1.0), (2.0, 1.0), (math.nan, 1.0)]:
        assert other.decide(*values) == guard.decide(*values)
