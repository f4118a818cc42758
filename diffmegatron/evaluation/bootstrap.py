"""95% intervals by the bootstrap, which is paired for the difference of two targets (models).

A unit is an item of a suite (benchmark), or a group of dependent items (``Suite.unit``). A
resample draws as many units as there are, with replacement. The arguments ``shares`` and ``others``
map each unit of a target to its contribution to a measure, such as an accuracy.
"""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from diffmegatron.evaluation.suite import Estimate, Mean

RESAMPLES = 2000
_SEED = 0
# Maximum number of elements of an array that `_resamples` yields; a single row may have more.
_COUNTS_AT_ONCE = 1 << 22
# Ends of a 95% interval.
_PERCENTILES = (2.5, 97.5)


def estimate(shares: Mapping[str, Mean]) -> Estimate | None:
    """Return a measure of one target with its interval; a single unit has no interval.

    The result is None without units, or if all weights are 0.
    """
    return _estimate(_arrays(shares, sorted(shares)))


def difference(shares: Mapping[str, Mean], others: Mapping[str, Mean]) -> Estimate | None:
    """Return the measure of one target minus that of another, with the interval of the difference.

    ``shares`` belongs to the first target, and ``others`` to the second. Only units that both
    targets have are used, and a resample draws the same units for both. The result is None without
    such units, or if a target has weight 0 in all of them.
    """
    both = sorted(shares.keys() & others.keys())
    return _estimate(_arrays(shares, both), _arrays(others, both))


def estimate_of_means(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> Estimate:
    """Return a statistic of several means over the same units, with its interval.

    Args:
        values: contribution of each unit to each mean, float64 [units, means].
        statistic: function that reduces means [..., means] to [...], such as the maximum.
    """
    units = len(values)
    return _interval(
        units, statistic(values.mean(0)), lambda drawn: statistic(drawn @ values / units)
    )


def _interval(
    units: int, value: np.ndarray, resampled: Callable[[np.ndarray], np.ndarray]
) -> Estimate:
    """Return ``value`` with its interval.

    ``resampled`` computes the values [n] of n resamples from their counts of each unit [n, units].
    """
    if units < 2:
        return Estimate(float(value), None, None, units)
    values = np.concatenate([resampled(drawn) for drawn in _resamples(units)])
    # If a resample draws only units of weight 0, its value is not finite and is left out.
    low, high = np.percentile(values[np.isfinite(values)], _PERCENTILES)
    return Estimate(float(value), float(low), float(high), units)


def _resamples(units: int) -> Iterator[np.ndarray]:
    """Yield how often each resample draws each unit, as int64 [n, units] for n resamples."""
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
    return _interval(
        units, value, lambda drawn: _subtracted([drawn @ target for target in targets])
    )


def _subtracted(sums: list[np.ndarray]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        first, *rest = (each[..., 0] / each[..., 1] for each in sums)
    return first - rest[0] if rest else first
