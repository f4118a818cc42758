"""Held-out loss: per token, per byte, per source, and by position in the context."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, takewhile
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from diffmegatron.evaluation.bootstrap import estimate
from diffmegatron.evaluation.figures import place_legend
from diffmegatron.evaluation.requests import Asking, Scoring
from diffmegatron.evaluation.suite import Item, Mean, Record, Records, Suite, Window
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import CHARACTERS, default_characters, first_texts, named_paths
from diffmegatron.section import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BYTE = "bits per byte"
TOKEN = "nats per token"
_UP_TO = "nats per token, tokens 1 to {:,}"
_UP_TO_OWN = _UP_TO + " of windows that have as many"
# The first mean over the beginning of windows is of so many tokens.
_FEWEST = 16


class Loss(Suite):
    """Negative log-likelihood of held-out text.

    Whole documents are cut into windows that each begin with the start token, so that every byte
    counts once whatever the tokenizer. ``packed`` joins the documents of a source by the token that
    ends them, whose own loss does not count, and cuts the whole.
    """

    name: ClassVar[str] = "loss"
    within_training: ClassVar[bool] = True
    title: ClassVar[str] = "Loss on held-out text"
    description: ClassVar[str] = (
        "The negative log-likelihood of text that no target was trained on: how badly the model "
        "predicts each token from those before it."
    )

    data: tuple[str, ...] = Field(
        min_length=1, description="text that no target was trained on, as PATH or NAME=PATH"
    )
    documents: Count = Field(default=64, description="the first of every source")
    characters: Count | None = CHARACTERS
    context: Window = Field(default=2048, description="tokens of a window, the start token counted")
    packed: bool = False

    @property
    def one_tokenizer(self) -> bool:
        """Packed, windows of other tokens hold other text."""
        return self.packed

    def items(self, target: Target) -> list[Item]:
        """A document, or a window of packed ones."""
        texts: dict[str, list[str]] = defaultdict(list)
        characters = self.characters or default_characters(self.context)
        for source, text in first_texts(self.data, self.documents, characters):
            texts[source].append(text)
        pieces: dict[str, Sequence[str | list[int]]] = dict(texts)
        if self.packed:
            pieces = {
                source: list(windows(_joined(of_source, target), self.context - 1))
                for source, of_source in texts.items()
            }
        return [
            Item(f"{source}/{number}", self.context, (source, piece))
            for source, of_source in pieces.items()
            for number, piece in enumerate(of_source)
        ]

    @property
    def lengths(self) -> list[int]:
        """Numbers of tokens at which the mean over the beginning of windows is taken, ascending.

        They are powers of two from 16, and what a full window holds beside the start token.
        """
        full = self.context - 1
        powers = takewhile(lambda n: n < full, (_FEWEST << doublings for doublings in count()))
        return [*powers, full]

    def ask(self, target: Target, item: Item) -> Asking:
        """Return sums of nats, tokens and bytes, and of the beginnings of windows.

        ``beginnings`` has, by number n of tokens, nats and tokens of the first n tokens of the
        windows with n tokens or more; ``full`` has the same of the windows that are full.
        """
        source, piece = item.content
        end = target.tokenizer.end_of_document
        ids = target.encode(piece) if isinstance(piece, str) else piece
        pieces = list(windows(ids, self.context - 1))
        answers = yield [Scoring([target.start], [window]) for window in pieces]
        nats, tokens = 0.0, 0
        beginnings = {n: [0.0, 0] for n in self.lengths}
        full = {n: [0.0, 0] for n in self.lengths}
        for window, (scored,) in zip(pieces, answers, strict=True):
            losses = scored.nats.double().numpy()
            # The token that ends a packed document is not text; whole documents lack it.
            counted = np.array([isinstance(piece, str) or token != end for token in window])
            sums, counts = np.cumsum(losses * counted), np.cumsum(counted)
            nats, tokens = nats + float(sums[-1]), tokens + int(counts[-1])
            for n in self.lengths:
                if n <= len(window):
                    _add(beginnings[n], sums[n - 1], counts[n - 1])
                if len(window) == self.context - 1:
                    _add(full[n], sums[n - 1], counts[n - 1])
        return {
            "source": source,
            # A packed window may begin or end within a character.
            "bytes": len(piece.encode()) if isinstance(piece, str) else None,
            "nats": nats,
            "tokens": tokens,
            "beginnings": {str(n): sums for n, sums in beginnings.items() if sums[1]},
            "full": {str(n): sums for n, sums in full.items() if sums[1]},
        }

    def means(self, record: Record) -> dict[str, Mean]:
        """Return nats per token and, of whole documents, bits per byte, of all and per source.

        Also nats per token of the first n tokens of windows: of the full windows, which are the
        same for every n, and of all windows with n tokens, which differ from n to n.
        """
        own = {TOKEN: Mean(record["nats"], record["tokens"], per_token=True)}
        if not self.packed:
            own[BYTE] = Mean(record["nats"] / math.log(2), record["bytes"])
        shares = dict(own)
        if len(self.data) > 1:
            shares |= {f"{name}, {record['source']}": share for name, share in own.items()}
        for name, sums in ((_UP_TO, record["full"]), (_UP_TO_OWN, record["beginnings"])):
            shares |= {
                name.format(n): Mean(sums[str(n)][0], sums[str(n)][1], per_token=True)
                for n in self.lengths
                if str(n) in sums
            }
        return shares

    def remarks(self, records: Mapping[str, Records]) -> list[str]:
        """Name the targets of which no window is full."""
        return [
            f"{name}: no window has {self.context - 1:,} tokens, so there is no mean over tokens "
            "1 to n of full windows; set loss.context lower or give longer texts"
            for name, of_target in records.items()
            if not any(record["full"] for record in of_target)
        ]

    def ordered(self, measures: Sequence[str]) -> list[str]:
        """Return those of all text, of beginnings, then of each source in the order of ``data``."""
        order = [
            *(TOKEN, BYTE),
            *(name.format(n) for name in (_UP_TO, _UP_TO_OWN) for n in self.lengths),
            *(f"{name}, {source}" for source in named_paths(self.data) for name in (TOKEN, BYTE)),
        ]
        return sorted(measures, key=order.index)

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return "lower"

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw the mean over the first n tokens of full windows, with its interval."""
        from matplotlib.ticker import NullLocator, StrMethodFormatter

        axes = figure.subplots()
        for name, of_target in records.items():
            shares = [self.means(record) for record in of_target]
            measured = {
                n: estimate(
                    {
                        str(place): own[_UP_TO.format(n)]
                        for place, own in enumerate(shares)
                        if _UP_TO.format(n) in own
                    }
                )
                for n in self.lengths
            }
            points = [(n, each) for n, each in measured.items() if each is not None]
            if not points:
                continue
            lengths, values = [n for n, _ in points], [each.value for _, each in points]
            (line,) = axes.plot(lengths, values, "o-", label=name)
            ends = [(each.low, each.high) for _, each in points if each.low is not None]
            if ends:
                low, high = zip(*ends, strict=True)
                axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.2)
        if not axes.has_data():
            return False
        axes.set(
            xlabel="n (tokens)",
            ylabel=f"{TOKEN}, mean of tokens 1 to n",
            title="Loss of the first n tokens of full windows, 95% intervals",
        )
        # A label for every number that is measured: the powers of ten would leave a narrow range
        # without one.
        axes.set_xscale("log", base=2)
        *powers, full = self.lengths
        axes.set_xticks([*(n for n in powers if n < full / 1.5), full])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(alpha=0.3)
        place_legend(axes)
        return True


def _add(sums: list[float], nats: float, tokens: float) -> None:
    sums[0] += float(nats)
    sums[1] += int(tokens)


def windows(ids: list[int], length: int) -> Iterator[list[int]]:
    """The ids in pieces of ``length``, the last as long as it is."""
    return (ids[first : first + length] for first in range(0, len(ids), length))


def _joined(texts: Sequence[str], target: Target) -> list[int]:
    end = target.tokenizer.end_of_document
    return [token for text in texts for token in (*target.encode(text), end)]
