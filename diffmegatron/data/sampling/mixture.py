"""Mixture of weighted sources (corpora), which determines the source of each sample of a run.

The weights and sources may change when a run resumes at sample n. The order before sample n stays
unchanged, and each source continues with its next sample.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from diffmegatron.errors import UserError


@dataclass(frozen=True)
class SourceWeight:
    """Path (without .bin), content hash and relative weight of a source."""

    path: str
    content: str
    weight: float


@dataclass(frozen=True)
class Period:
    """Part of a run with constant weights, from sample ``from_sample`` to the next period."""

    from_sample: int
    sources: tuple[SourceWeight, ...]


class MixtureHistory:
    """Mixtures of all periods of a run; the first period begins at sample 0."""

    def __init__(self, periods: Sequence[Period]) -> None:
        self.periods = tuple(periods)
        self._starts = [period.from_sample for period in self.periods]
        self._mixtures = [_mixture(period) for period in self.periods]
        self._before: list[dict[str, int]] = [{}]
        for number, (start, end) in enumerate(pairwise(self._starts)):
            self._before.append(self._counts_within(number, end - start))

    def locate(self, index: int) -> tuple[str, int]:
        """Return the content hash of a sample's source, and the sample's number in this source."""
        number = bisect_right(self._starts, index) - 1
        content, local = self._mixtures[number].locate(index - self._starts[number])
        return content, self._before[number].get(content, 0) + local

    def counts(self, num_samples: int) -> dict[str, int]:
        """Count each source's samples (by content hash) among the first ``num_samples`` samples."""
        number = max(0, bisect_right(self._starts, num_samples) - 1)
        return self._counts_within(number, num_samples - self._starts[number])

    def _counts_within(self, number: int, num_samples: int) -> dict[str, int]:
        """Count each source's samples in the run before sample ``num_samples`` of a period."""
        counts = dict(self._before[number])
        for content, count in self._mixtures[number].counts(num_samples).items():
            counts[content] = counts.get(content, 0) + count
        return counts

    def changed(self, from_sample: int, sources: tuple[SourceWeight, ...]) -> "MixtureHistory":
        """Return a history in which the given weights apply from sample ``from_sample`` on.

        Periods that begin at or after ``from_sample`` are dropped. This history itself
        is returned if its last period has the same weights after normalization.
        """
        if _shares(self.periods[-1].sources) == _shares(sources):
            return self
        kept = [period for period in self.periods if period.from_sample < from_sample]
        return MixtureHistory([*kept, Period(from_sample, sources)])

    def path(self, content: str) -> str:
        """Return the path of the source with this hash, from the last period that contains it."""
        known = {s.content: s.path for period in self.periods for s in period.sources}
        return known[content]

    def to_json(self) -> list[dict[str, Any]]:
        """Return the history as JSON-serializable values for a checkpoint."""
        return [asdict(period) for period in self.periods]

    @classmethod
    def from_json(cls, saved: Sequence[dict[str, Any]]) -> "MixtureHistory":
        """Create a history from the values that :meth:`to_json` returned."""
        return cls(
            [
                Period(part["from_sample"], tuple(SourceWeight(**s) for s in part["sources"]))
                for part in saved
            ]
        )


def _mixture(period: Period) -> "Mixture":
    weights = {source.content: source.weight for source in period.sources}
    if min(weights.values(), default=0) < 0 or sum(weights.values()) <= 0:
        listed = ", ".join(f"{source.path} {source.weight:g}" for source in period.sources)
        raise UserError(
            f"the weights of data.sources ({listed}) must be at least 0 and not all zero"
        )
    return Mixture(weights)


def _shares(sources: tuple[SourceWeight, ...]) -> dict[str, float]:
    total = sum(source.weight for source in sources)
    return {source.content: source.weight / total for source in sources if source.weight}


@dataclass(frozen=True)
class _Node:
    """Node of a :class:`Mixture` tree, which divides samples between two groups of sources.

    Of the first n samples, floor(n * ``share``) belong to the left group. A group with a single
    source is stored as the name of this source.
    """

    share: Fraction
    left: "_Node | str"
    right: "_Node | str"


class Mixture:
    """Assignment of samples to sources in proportion to ``weights`` (name -> weight).

    The source of a sample is found by descending a binary tree over the sources. Among the first n
    samples, the count of each source deviates from its exact share by at most one sample per level
    of the tree.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        # The sources are sorted, so that their order in ``weights`` has no effect.
        exact = {name: Fraction(weights[name]).limit_denominator(1 << 40) for name in weights}
        self._names = sorted(weights)
        self._tree = _build([name for name in self._names if exact[name]], exact)

    def locate(self, index: int) -> tuple[str, int]:
        """Return the source of a sample, and the sample's number in this source."""
        node = self._tree
        while isinstance(node, _Node):
            before = _floor(index, node.share)
            if _floor(index + 1, node.share) > before:
                node, index = node.left, before
            else:
                node, index = node.right, index - before
        return node, index

    def counts(self, samples: int) -> dict[str, int]:
        """Return how many of the first ``samples`` samples belong to each source."""
        counts = dict.fromkeys(self._names, 0)
        pending: list[tuple[_Node | str, int]] = [(self._tree, samples)]
        while pending:
            node, count = pending.pop()
            if isinstance(node, str):
                counts[node] = count
                continue
            left = _floor(count, node.share)
            pending += [(node.left, left), (node.right, count - left)]
        return counts


def _build(names: list[str], weights: Mapping[str, Fraction]) -> _Node | str:
    if len(names) == 1:
        return names[0]
    left, right = names[: len(names) // 2], names[len(names) // 2 :]
    share = Fraction(sum(weights[n] for n in left), sum(weights[n] for n in names))
    return _Node(share, _build(left, weights), _build(right, weights))


def _floor(index: int, share: Fraction) -> int:
    return index * share.numerator // share.denominator
