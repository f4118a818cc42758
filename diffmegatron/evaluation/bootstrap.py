"""Intervals by the paired bootstrap: all targets use the same resamples of items."""

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from diffmegatron.evaluation.suite import Estimate, Mean

RESAMPLES = 2000
_SEED = 0
_COUNTS_AT_ONCE = 1 << 22
# Ends of a 95% interval.
_PERCENTILES = (2.5, 97.5)


def estimate(shares: Mapping[str, Mean]) -> Estimate | None:
    """Return a measure of one target from its items' contributions; None if all weights are 0."""
    return _estimate(_arrays(shares, sorted(shares)))


def difference(shares: Mapping[str, Mean], others: Mapping[str, Mean]) -> Estimate | None:
    """Return the difference of a measure between two targets, on the items that both have.

    A resample draws the same items for both targets.
    """
    both = sorted(shares.keys() & others.keys())
    return _estimate(_arrays(shares, both), _arrays(others, both))


def estimate_of_means(
    values: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]
) -> Estimate:
    """Estimate a statistic of several means over the same units.

    Args:
        values: contribution of each unit to each mean, float64 [units, means].
        statistic: function from means [..., means] to numbers [...], such as the maximum.
    """
    units = len(values)
    value = float(statistic(values.mean(0)))
    if units < 2:
        return Estimate(value, None, None, units)
    found = np.concatenate([statistic(drawn @ values / units) for drawn in _resamples(units)])
    low, high = np.percentile(found, _PERCENTILES)
    return Estimate(value, float(low), float(high), units)


def _resamples(units: int) -> Iterator[np.ndarray]:
    """Yield counts of each unit in ``RESAMPLES`` resamples, as int64 [resamples, units]."""
    random = np.random.default_rng(_SEED)
    left = RESAMPLES
    while left:
        rows = min(left, max(1, _COUNTS_AT_ONCE // units))
        yield random.multinomial(units, np.full(units, 1 / units), size=rows)
        left -= rows


def _arrays(shares: Mapping[str, Mean], keys: list[str]) -> np.ndarray:
    """Return totals and weights, float64 [items, 2]."""
    return np.array([shares[key][:2] for key in keys], dtype=np.float64).reshape(-1, 2)


def _estimate(*targets: np.ndarray) -> Estimate | None:
    items = len(targets[0])
    if not items or not all(target[:, 1].sum() for target in targets):
        return None
    value = _subtracted([target.sum(0) for target in targets])
    if items < 2:
        return Estimate(float(value), None, None, items)
    values = np.concatenate(
        [_subtracted([drawn @ target for target in targets]) for drawn in _resamples(items)]
    )
    # All weights of a resample may be 0.
    low, high = np.percentile(values[np.isfinite(values)], _PERCENTILES)
    return Estimate(float(value), float(low), float(high), items)


def _subtracted(sums: list[np.ndarray]) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        first, *rest = (each[..., 0] / each[..., 1] for each in sums)
    return first - rest[0] if rest else first
