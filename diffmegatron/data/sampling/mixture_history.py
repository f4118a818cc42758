"""Mixtures of a run over time: weights and sources may change when a run resumes.

A change of the weights or sources at sample n begins a new period. The order before sample n stays
unchanged, and each source continues with its next sample. A checkpoint stores all periods. A source
is identified by the hash of its content, because its path may change.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from diffmegatron.data.sampling.mixture import Mixture
from diffmegatron.errors import UserError


@dataclass(frozen=True)
class SourceWeight:
    """PREFIX, content hash and relative weight of a source (corpus) in one period."""

    path: str
    content: str
    weight: float


@dataclass(frozen=True)
class Period:
    """Period of a run with constant weights, which begins at the sample ``from_sample``."""

    from_sample: int
    sources: tuple[SourceWeight, ...]


class MixtureHistory:
    """Mixtures of all periods of a run; the first period begins at sample 0."""

    def __init__(self, periods: Sequence[Period]) -> None:
        self.periods = tuple(periods)
        self._starts = [period.from_sample for period in self.periods]
        # Sources are sorted by content hash, so that their order in the recipe has no effect.
        self._contents = [
            sorted(source.content for source in period.sources) for period in self.periods
        ]
        self._mixtures = [
            _mixture(period, contents)
            for period, contents in zip(self.periods, self._contents, strict=True)
        ]
        self._before: list[dict[str, int]] = [{}]
        for number, (start, end) in enumerate(pairwise(self._starts)):
            self._before.append(self._counts_within(number, end - start))

    def locate(self, index: int) -> tuple[str, int]:
        """Return the content hash of a sample's source, and the sample's number in this source."""
        number = bisect_right(self._starts, index) - 1
        place, local = self._mixtures[number].locate(index - self._starts[number])
        content = self._contents[number][place]
        return content, self._before[number].get(content, 0) + local

    def counts(self, num_samples: int) -> dict[str, int]:
        """Count each source's samples (by content hash) among the first ``num_samples`` samples."""
        number = max(0, bisect_right(self._starts, num_samples) - 1)
        return self._counts_within(number, num_samples - self._starts[number])

    def _counts_within(self, number: int, num_samples: int) -> dict[str, int]:
        """Count as :meth:`counts` does, up to ``num_samples`` samples into period ``number``."""
        counts = dict(self._before[number])
        within = self._mixtures[number].counts(num_samples)
        for content, count in zip(self._contents[number], within, strict=True):
            counts[content] = counts.get(content, 0) + count
        return counts

    def changed(self, from_sample: int, sources: tuple[SourceWeight, ...]) -> "MixtureHistory":
        """Return a history in which the given weights apply from sample ``from_sample`` on.

        Later periods are dropped. If ``sources`` have the normalized weights of the last period,
        this history itself is returned.
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
                Period(
                    period["from_sample"],
                    tuple(SourceWeight(**source) for source in period["sources"]),
                )
                for period in saved
            ]
        )


def _mixture(period: Period, contents: list[str]) -> Mixture:
    weights = {source.content: source.weight for source in period.sources}
    try:
        return Mixture([weights[content] for content in contents])
    except ValueError:
        listed = ", ".join(f"{source.path} {source.weight:g}" for source in period.sources)
        raise UserError(
            f"the weights of data.sources ({listed}) must be at least 0 and not all zero"
        ) from None


def _shares(sources: tuple[SourceWeight, ...]) -> dict[str, float]:
    total = sum(source.weight for source in sources)
    return {source.content: source.weight / total for source in sources if source.weight}
