"""Perplexity of text over windows of a fixed length that advance by a stride."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_bars
from diffmegatron.evaluation.requests import ItemGenerator, Scoring
from diffmegatron.evaluation.suite import Estimate, Item, Mean, Record, Records, Window
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import TextSuite, named_paths, read_texts
from diffmegatron.section import Count, Size

_NATS = "nats per token"
_PERPLEXITY = "perplexity"
_BETWEEN_DOCUMENTS = "\n\n"


class Perplexity(TextSuite):
    """Perplexity as the documentation of ``transformers`` computes it.

    The documents of a source are joined by empty lines and tokenized as one text, without a start
    token. Windows of ``context`` tokens begin every ``stride`` tokens. A window scores only tokens
    that are in no earlier window. The tokens before them are their context.
    """

    name = "perplexity"
    direction = "lower"
    title = "Perplexity of held-out text"
    description = (
        "The exponential of the mean negative log-likelihood per token, in windows that "
        "overlap. It is the number of equally likely tokens with the same loss. An item is a "
        "window; windows of one text are alike, so the intervals are narrow. Texts and windows "
        "are other ones than in the suite loss."
    )

    documents: Count | None = Field(
        default=None, description="number of documents per source (null: all)"
    )
    context: Window = Field(default=2048, description="tokens of a window")
    stride: Size | None = Field(
        default=None, description="tokens between beginnings of windows; half of context by default"
    )

    @override
    def check(self, target: Target) -> None:
        if self._stride > self.context:
            raise UserError(
                f"perplexity.stride {self.stride} exceeds perplexity.context {self.context}, so "
                f"tokens between windows would not count; give at most {self.context}"
            )

    @override
    def items(self, target: Target) -> list[Item]:
        found = []
        for source, path in named_paths(self.data).items():
            documents = islice(read_texts(path), self.documents)
            ids = target.encode(_BETWEEN_DOCUMENTS.join(documents))
            if len(ids) < 2:
                raise UserError(f"source {source!r} has {len(ids)} tokens; give one with 2 or more")
            found += [
                Item(f"{source}/{number}", len(window), (source, window, count))
                for number, (window, count) in enumerate(_windows(ids, self.context, self._stride))
            ]
        return found

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        source, window, count = item.content
        ((scored,),) = yield [Scoring(window[:-count], [window[-count:]])]
        return {"source": source, "nats": scored.losses.double().sum().item(), "tokens": count}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        share = Mean(record["nats"], record["tokens"], per_token=True)
        if len(self.data) == 1:
            return {_NATS: share}
        return {_NATS: share, f"{_NATS}, {record['source']}": share}

    @override
    def totals(self, records: Records) -> dict[str, Estimate]:
        found = {}
        for measure, nats in estimate_measures(self, records).items():
            # The exponential increases, so it maps percentiles to percentiles.
            low, high = (None if end is None else _exp(end) for end in (nats.low, nats.high))
            name = measure.replace(_NATS, _PERPLEXITY)
            found[name] = Estimate(_exp(nats.value), low, high, nats.units)
        return found

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        sources = list(named_paths(self.data))
        several = len(sources) > 1
        names = [f"{_PERPLEXITY}, {source}" if several else _PERPLEXITY for source in sources]
        totals = {target: self.totals(each) for target, each in records.items()}
        bars = {target: [own.get(name) for name in names] for target, own in totals.items()}
        plot_bars(figure.subplots(), sources, bars, _PERPLEXITY)
        return True

    @property
    def _stride(self) -> int:
        return self.stride or max(1, self.context // 2)


def _windows(ids: Sequence[int], length: int, stride: int) -> Iterator[tuple[Sequence[int], int]]:
    """Yield windows, each with the number of scored tokens at its end, if that is not 0."""
    counted = 0
    for first in range(0, len(ids), stride):
        end = min(first + length, len(ids))
        # The first token of a window is not scored, because no token precedes it.
        count = end - max(counted, first + 1)
        if count:
            yield ids[first:end], count
        counted = end
        if end == len(ids):
            return


def _exp(nats: float) -> float:
    """Return exp(nats), limited to exp(709), because larger values overflow float64."""
    return math.exp(min(nats, 709.0))
