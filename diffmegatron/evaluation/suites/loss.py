"""Loss and perplexity of held-out text, which is cut into windows."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import Figure, estimate_measures, place_legend, plot_bars
from diffmegatron.evaluation.requests import ItemGenerator, Scoring
from diffmegatron.evaluation.suite import Estimate, Item, Mean, Record, Records, Window
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import TextSuite, WindowSuite, named_paths, read_texts, split
from diffmegatron.section import Count, Size

BYTE = "bits per byte"
TOKEN = "nats per token"
_PERPLEXITY = "perplexity"
_UP_TO = "nats per token, tokens 1 to {:,}"
_UP_TO_OWN = _UP_TO + " of windows that have as many"


class Loss(WindowSuite):
    """Negative log-likelihood of held-out text, in windows that do not overlap.

    A document is cut into windows of ``context`` tokens. Each window begins with the start token,
    so every byte of the document counts once. A full window has ``context - 1`` tokens after it.

    - ``tokens 1 to n`` is the mean over the first n tokens of the full windows, for n = 16, 32, 64,
      ... and for the whole window. The curve shows the benefit of a longer context. With
      ``loss.context=65536`` and books, it is the paper's figure 4. Without a full window, the
      report states that this measure is missing.
    - ``tokens 1 to n of windows that have as many`` is the mean over the first n tokens of all
      windows with n tokens or more. Do not compare different n, because their windows differ.
    """

    name = "loss"
    direction = "lower"
    within_training = True
    title = "Loss on held-out text"
    description = (
        "The mean negative log-likelihood of each token of the given text after the tokens "
        "before it. Longer texts weigh more. A model that was trained on the text gets too low "
        "a loss. A row for tokens 1 to n of windows that have as many uses only windows with at "
        "least n tokens, which differ from row to row, so compare models within a row."
    )

    packed: bool = Field(
        default=False,
        description="join the documents of a source before they are cut, with an end-of-document "
        "token after each, whose loss does not count",
    )

    @property
    @override
    def needs_one_tokenizer(self) -> bool:
        # Different tokenizers would cut packed documents into different windows.
        return self.packed

    @override
    def items(self, target: Target) -> list[Item]:
        texts: dict[str, list[str]] = defaultdict(list)
        for source, text in self.texts():
            texts[source].append(text)
        found: list[Item] = []
        for source, of_source in texts.items():
            pieces: Iterable[str | list[int]] = of_source
            if self.packed:
                end = target.tokenizer.end_of_document
                ids = [token for text in of_source for token in (*target.encode(text), end)]
                pieces = split(ids, self.context - 1)
            found += [
                Item(f"{source}/{number}", self.context, (source, piece))
                for number, piece in enumerate(pieces)
            ]
        return found

    @property
    def lengths(self) -> list[int]:
        """Numbers n for means over tokens 1 to n: powers of two from 16, and ``context - 1``."""
        full = self.context - 1
        return sorted({*(1 << bit for bit in range(4, full.bit_length())), full})

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        """Score the windows of a document, or one packed window, and return the item's record.

        The record has the loss in nats and the number of tokens, both summed over the item. For
        each n of :attr:`lengths`, ``beginnings`` has the same two sums over only the first n tokens
        of every window with at least n tokens, and ``full`` over the first n tokens of every window
        with ``context - 1`` tokens. End-of-document tokens in a packed window do not count.
        """
        source, piece = item.content
        end = target.tokenizer.end_of_document
        ids = target.encode(piece) if isinstance(piece, str) else piece
        pieces = list(split(ids, self.context - 1))
        answers = yield [Scoring([target.start_token], [window]) for window in pieces]
        nats, tokens = 0.0, 0
        beginnings = {n: [0.0, 0] for n in self.lengths}
        full = {n: [0.0, 0] for n in self.lengths}
        for window, (scored,) in zip(pieces, answers, strict=True):
            losses = scored.losses.double().numpy()
            counted = np.array([isinstance(piece, str) or token != end for token in window])
            sums, counts = np.cumsum(losses * counted), np.cumsum(counted)
            nats, tokens = nats + float(sums[-1]), tokens + int(counts[-1])
            is_full = len(window) == self.context - 1
            for n in (n for n in self.lengths if n <= len(window)):
                for table in (beginnings, full) if is_full else (beginnings,):
                    table[n][0] += float(sums[n - 1])
                    table[n][1] += int(counts[n - 1])
        return {
            "source": source,
            # A packed window may cut a character, so it has no number of bytes.
            "bytes": len(piece.encode()) if isinstance(piece, str) else None,
            "nats": nats,
            "tokens": tokens,
            "beginnings": {str(n): sums for n, sums in beginnings.items() if sums[1]},
            "full": {str(n): sums for n, sums in full.items() if sums[1]},
        }

    @override
    def means(self, record: Record) -> dict[str, Mean]:
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

    @override
    def remarks(self, records: Mapping[str, Records]) -> list[str]:
        return [
            f"{name}: no window has {self.context - 1:,} tokens, so there is no mean over tokens "
            "1 to n of full windows; lower loss.context, or raise loss.characters"
            for name, of_target in records.items()
            if not any(record["full"] for record in of_target)
        ]

    @override
    def ordered(self, measures: Sequence[str]) -> list[str]:
        order = [
            *(TOKEN, BYTE),
            *(name.format(n) for name in (_UP_TO, _UP_TO_OWN) for n in self.lengths),
            *(f"{name}, {source}" for source in named_paths(self.data) for name in (TOKEN, BYTE)),
        ]
        return sorted(measures, key=order.index)

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        """Draw the mean loss of the first n tokens of full windows, by n."""
        from matplotlib.ticker import NullLocator, StrMethodFormatter

        axes = figure.subplots()
        for name, of_target in records.items():
            estimates = estimate_measures(self, of_target)
            measured = {n: estimates.get(_UP_TO.format(n)) for n in self.lengths}
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
        axes.set_xscale("log", base=2)
        *powers, full = self.lengths
        # Leave out powers of two close to the longest length, because the labels would overlap.
        axes.set_xticks([*(n for n in powers if n < full / 1.5), full])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(alpha=0.3)
        place_legend(axes)
        return True


class Perplexity(TextSuite):
    """Perplexity as the documentation of ``transformers`` computes it.

    The documents of a source are joined by empty lines and tokenized as one text without a start
    token. Windows of ``context`` tokens begin every ``stride`` tokens. A token counts in the first
    window that contains it, except the first token of the text. The perplexity is the exponential
    of the mean loss over all tokens that count. The resamples for its interval draw windows.

    - A short stride gives each token a long context, and needs ``context / stride`` times the work
      of adjacent windows.
    - The code in the documentation of ``transformers`` weights each window by one token too few, so
      its last digits differ.
    - Compare perplexities only between models with the same tokenizer. They differ from the
      exponential of the suite ``loss``.
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
            ids = target.encode("\n\n".join(documents))
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
            return {TOKEN: share}
        return {TOKEN: share, f"{TOKEN}, {record['source']}": share}

    @override
    def totals(self, records: Records) -> dict[str, Estimate]:
        found = {}
        for measure, nats in estimate_measures(self, records).items():
            # exp is an increasing function, so it maps percentiles to percentiles.
            low, high = (None if end is None else _exp(end) for end in (nats.low, nats.high))
            name = measure.replace(TOKEN, _PERPLEXITY)
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
    """Yield (window, number of tokens to score at its end) for windows with tokens to score."""
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
