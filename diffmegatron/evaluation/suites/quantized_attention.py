"""Loss with quantised attention logits (Differential Transformer, Ye et al., section 3.7)."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field
from typing_extensions import override

from diffmegatron.evaluation.captured_attention import quantize_logits
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_curves
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Item, Mean, Record, Records
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import WindowSuite
from diffmegatron.section import Count

_FULL = "as they are"


class QuantizedAttention(WindowSuite):
    """Loss on held-out text with unchanged attention logits, and with logits of ``bits`` bits.

    The paper measures the accuracy on HellaSwag instead of the loss.
    """

    name = "quantized-attention"
    direction = "lower"
    reads_attention = True
    title = "Loss with quantised attention logits"
    description = (
        "The loss if attention logits are rounded to a few bits before the softmax, and what "
        "the rounding adds. The rounding adds less to the loss of a model with small outliers."
    )

    documents: Count = Field(default=16, description="number of documents per source")
    characters: Count = Field(default=8_000, description="longer documents are cut")
    bits: tuple[Annotated[int, Field(ge=2, le=16)], ...] = Field(default=(8, 6, 4), min_length=1)

    @override
    def items(self, target: Target) -> list[Item]:
        return [
            Item(str(number), self.context, text) for number, (_, text) in enumerate(self.texts())
        ]

    @override
    def score(self, model: Model, item: Item) -> Record:
        windows = self.windows(item.content, model.target)
        nats = {_FULL: _nats(model, windows)}
        for bits in self.bits:
            with quantize_logits(model, bits):
                nats[f"{bits} bits"] = _nats(model, windows)
        return {
            "nats": nats,
            "tokens": sum(map(len, windows)),
            "bytes": len(item.content.encode()),
        }

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        nats, tokens = record["nats"], record["tokens"]
        shares = {f"nats per token, {name}": Mean(n, tokens, True) for name, n in nats.items()}
        shares |= {
            f"nats per token that {name} add": Mean(n - nats[_FULL], tokens, True)
            for name, n in nats.items()
            if name != _FULL
        }
        return shares

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
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


def _nats(model: Model, windows: list[list[int]]) -> float:
    return sum(
        model.losses([model.target.start_token, *window]).double().sum().item()
        for window in windows
    )
