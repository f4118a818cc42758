"""Held-out loss: per token, per byte, per source, and by position in the context."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Item, Mean, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import first_texts, named_paths
from diffmegatron.section import Count, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BYTE = "bits per byte"
TOKEN = "nats per token"
_UP_TO = "nats per token, tokens 1 to "


class Loss(Suite):
    """Negative log-likelihood of held-out text.

    Whole documents are cut into windows that each begin with the start token, so that every byte
    counts once whatever the tokenizer. ``packed`` joins the documents of a source by the token that
    ends them, whose own loss does not count, and cuts the whole.
    """

    name: ClassVar[str] = "loss"
    within_training: ClassVar[bool] = True
    title: ClassVar[str] = "Loss on held-out text"

    data: tuple[str, ...] = Field(
        min_length=1, description="text that no target was trained on, as PATH or NAME=PATH"
    )
    documents: Count = Field(default=64, description="the first of every source")
    characters: Count = Field(default=20_000, description="a longer document ends there")
    context: Size = Field(default=2048, description="tokens of a window, the start token counted")
    packed: bool = False

    @property
    def one_tokenizer(self) -> bool:
        """Packed, windows of other tokens hold other text."""
        return self.packed

    def items(self, target: Target) -> list[Item]:
        """A document, or a window of packed ones."""
        texts: dict[str, list[str]] = defaultdict(list)
        for source, text in first_texts(self.data, self.documents, self.characters):
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

    def score(self, model: Model, item: Item) -> Record:
        """Sums of nats, tokens and bytes, and nats by position in powers of two."""
        source, piece = item.content
        end = model.target.tokenizer.end_of_document
        ids = model.target.encode(piece) if isinstance(piece, str) else piece
        sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0])
        for window in windows(ids, self.context - 1):
            losses = model.losses([model.target.start, *window]).double().tolist()
            for position, (token, loss) in enumerate(zip(window, losses, strict=True)):
                # Whole documents have no such token.
                if token != end or isinstance(piece, str):
                    part = sums[position.bit_length()]
                    part[0] += loss
                    part[1] += 1
        return {
            "source": source,
            # A window may begin or end within a character.
            "bytes": len(piece.encode()) if isinstance(piece, str) else None,
            "nats": math.fsum(nats for nats, _ in sums.values()),
            "tokens": sum(tokens for _, tokens in sums.values()),
            # Of positions 2^(k-1) to 2^k - 1, counted from 0: nats and tokens.
            "positions": {str(power): part for power, part in sorted(sums.items())},
        }

    def means(self, record: Record) -> dict[str, Mean]:
        """Nats per token and, of whole documents, bits per byte, of all and per source.

        And nats of the tokens up to a position, of the items that have so many in a window.
        """
        own = {TOKEN: Mean(record["nats"], record["tokens"], per_token=True)}
        if not self.packed:
            own[BYTE] = Mean(record["nats"] / math.log(2), record["bytes"])
        shares = dict(own)
        if len(self.data) > 1:
            shares |= {f"{name}, {record['source']}": share for name, share in own.items()}
        nats, tokens = 0.0, 0
        for power in range(self.context.bit_length()):
            more = record["positions"].get(str(power), (0.0, 0))
            if more[1] < 2**power // 2:
                break
            nats, tokens = nats + more[0], tokens + more[1]
            if power >= 4:
                shares[f"{_UP_TO}{2**power:,}"] = Mean(nats, tokens, per_token=True)
        return shares

    def ordered(self, measures: Sequence[str]) -> list[str]:
        """Those of all text, then each source's in the order of ``data``."""
        places = {
            f"{measure}, {name}": place
            for place, name in enumerate(named_paths(self.data))
            for measure in (TOKEN, BYTE)
        }
        return sorted(measures, key=lambda measure: places.get(measure, -1))

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """The mean over the tokens up to a position, as positions go on."""
        from matplotlib.ticker import StrMethodFormatter

        axes = figure.subplots()
        for name, of_target in records.items():
            sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
            for measure, share in (each for one in of_target for each in self.means(one).items()):
                if measure.startswith(_UP_TO):
                    part = sums[int(measure.removeprefix(_UP_TO).replace(",", ""))]
                    part[0] += share.total
                    part[1] += share.weight
            points = [(n, nats / tokens) for n, (nats, tokens) in sorted(sums.items())]
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set(xlabel="n", ylabel=TOKEN, title="Mean loss of tokens 1 to n")
        # The powers of two that are measured: those of ten leave a narrow range without a number.
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.grid(alpha=0.3)
        axes.legend()
        return True


def windows(ids: list[int], length: int) -> Iterator[list[int]]:
    """The ids in pieces of ``length``, the last as long as it is."""
    return (ids[first : first + length] for first in range(0, len(ids), length))


def _joined(texts: Sequence[str], target: Target) -> list[int]:
    end = target.tokenizer.end_of_document
    return [token for text in texts for token in (*target.encode(text), end)]
