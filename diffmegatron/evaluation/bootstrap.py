"""95% intervals by the paired bootstrap: all targets (models) use the same resamples.

A measure is a number that a suite (a benchmark) computes for a target, such as an accuracy. A unit
is usually an item of the suite, or a group of items that depend on each other (:meth:`Suite.unit`).
A resample draws as many units as there are, with replacement.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from diffmegatron.evaluation.suite import Estimate, Mean

RESAMPLES = 2000
_SEED = 0
# Maximum number of elements of an array [resamples, units] that `_resamples` yields. If there are
# more units than this, each array has a single row.
_COUNTS_AT_ONCE = 1 << 22
# Ends of a 95% interval.
_PERCENTILES = (2.5, 97.5)


def estimate(shares: Mapping[str, Mean]) -> Estimate | None:
    """Return a measure of one target with its interval.

    The measure is the sum of the units' totals, divided by the sum of their weights. With a single
    unit it has no interval. The result is None if there are no units or all weights are 0.

    Args:
        shares: name of each unit -> its contribution (total and weight) to the measure.
    """
    return _estimate(_arrays(shares, sorted(shares)))


def difference(shares: Mapping[str, Mean], others: Mapping[str, Mean]) -> Estimate | None:
    """Return a measure of one target minus that of another target, with its interval.

    Only units that both targets have are used, and a resample draws the same units for both. With a
    single such unit there is no interval. The result is None if there is no such unit, or if one of
    the targets has weight 0 in all of them.

    Args:
        shares: name of each unit -> its contribution to the measure of one target.
        others: name of each unit -> its contribution to the measure of the target that is
            subtracted.
    """
    both = sorted(shares.keys() & others.keys())
    return _estimate(_arrays(shares, both), _arrays(others, both))


def estimate_of_means(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> Estimate:
    """Return a statistic of several means over the same units, with its interval.

    The estimate of a single unit has None for both ends of the interval.

    Args:
        values: contribution of each unit to each mean, float64 [units, means].
        statistic: function that reduces means [..., means] to [...], such as the maximum.
    """
    units = len(values)
    value = float(statistic(values.mean(0)))
    if units < 2:
        return Estimate(value, None, None, units)
    found = np.concatenate([statistic(drawn @ values / units) for drawn in _resamples(units)])
    low, high = np.percentile(found, _PERCENTILES)
    return Estimate(value, float(low), float(high), units)


def _resamples(units: int) -> Iterator[np.ndarray]:
    """Yield arrays int64 [resamples, units]: how often each resample draws each unit.

    The resamples are divided among the arrays: together, the arrays have ``RESAMPLES`` rows.
    """
    random = np.random.default_rng(_SEED)
    left = RESAMPLES
    while left:
        rows = min(left, max(1, _COUNTS_AT_ONCE // units))
        yield random.multinomial(units, np.full(units, 1 / units), size=rows)
        left -= rows


def _arrays(shares: Mapping[str, Mean], keys: list[str]) -> np.ndarray:
    """Return the totals and weights of the units ``keys``, float64 [units, 2]."""
    return np.array([shares[key][:2] for key in keys], dtype=np.float64).reshape(-1, 2)


def _estimate(*targets: np.ndarray) -> Estimate | None:
    units = len(targets[0])
    if not units or not all(target[:, 1].sum() for target in targets):
        return None
    value = _subtracted([target.sum(0) for target in targets])
    if units < 2:
        return Estimate(float(value), None, None, units)
    values = np.concatenate(
        [_subtracted([drawn @ target for target in targets]) for drawn in _resamples(units)]
    )
    # If a resample draws only units of weight 0, its value is not finite and is left out.
    low, high = np.percentile(values[np.isfinite(values)], _PERCENTILES)
    return Estimate(float(value), float(low), float(high), units)


def _subtracted(sums: list[np.ndarray]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        first, *rest = (each[..., 0] / each[..., 1] for each in sums)
    return first - rest[0] if rest else first
