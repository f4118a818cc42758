"""Attention logits of fewer bits, and what is lost by them (Ye et al., section 3.7)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from diffmegatron.evaluation.captured_attention import quantized
from diffmegatron.evaluation.figures import estimate_measures, plot_curves
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Item, Mean, Record, Records, Suite, Window
from diffmegatron.evaluation.suites.loss import windows
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import first_texts
from diffmegatron.section import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FULL = "as they are"


class QuantizedAttention(Suite):
    """Loss on held-out text with the logits as they are, and rounded by absmax to each of ``bits``.

    The paper has HellaSwag's accuracy instead of the loss.
    """

    name: ClassVar[str] = "quantized-attention"
    title: ClassVar[str] = "Loss with quantised attention logits"
    description: ClassVar[str] = (
        "The loss when attention logits are rounded to a few bits before the softmax. A model "
        "with small outliers loses less."
    )

    data: tuple[str, ...] = Field(
        min_length=1, description="text that no target was trained on, as PATH or NAME=PATH"
    )
    bits: tuple[Annotated[int, Field(ge=2, le=16)], ...] = Field(default=(8, 6, 4), min_length=1)
    documents: Count = Field(default=16, description="the first of every source")
    characters: Count = Field(default=8_000, description="a longer document ends there")
    context: Window = Field(default=2048, description="tokens of a window, the start token counted")

    def check(self, target: Target) -> None:
        """Its kind of attention is known."""
        _ = target.variant

    def items(self, target: Target) -> list[Item]:
        """A document."""
        texts = first_texts(self.data, self.documents, self.characters)
        return [Item(str(number), self.context, text) for number, (_, text) in enumerate(texts)]

    def score(self, model: Model, item: Item) -> Record:
        """Nats by bits; tokens and bytes."""
        ids = model.target.encode(item.content)
        nats = {_FULL: self._nats(model, ids)}
        for bits in self.bits:
            with quantized(model, bits):
                nats[f"{bits} bits"] = self._nats(model, ids)
        return {"nats": nats, "tokens": len(ids), "bytes": len(item.content.encode())}

    def means(self, record: Record) -> dict[str, Mean]:
        """Nats per token by bits, and what they add to those of the logits as they are."""
        nats, tokens = record["nats"], record["tokens"]
        shares = {f"nats per token, {name}": Mean(n, tokens, True) for name, n in nats.items()}
        shares |= {
            f"nats per token that {name} add": Mean(n - nats[_FULL], tokens, True)
            for name, n in nats.items()
            if name != _FULL
        }
        return shares

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return "lower"

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw the loss by bits."""
        names = [_FULL, *(f"{bits} bits" for bits in self.bits)]
        estimates = {name: estimate_measures(self, each) for name, each in records.items()}
        points = {
            target: [(n, own[f"nats per token, {name}"]) for n, name in enumerate(names)]
            for target, own in estimates.items()
        }
        axes = figure.subplots()
        plot_curves(axes, points, "attention logits", "nats per token")
        axes.set_xticks(range(len(names)), names)
        return True

    def _nats(self, model: Model, ids: list[int]) -> float:
        return sum(
            model.losses([model.target.start, *window]).double().sum().item()
            for window in windows(ids, self.context - 1)
        )
