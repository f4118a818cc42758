"""Outliers of activations, and the loss with quantised attention logits.

Differential Transformer (Ye et al., section 3.7) measures the outliers, and the accuracy with
quantised logits.
"""

import base64
import binascii
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.captured_attention import (
    LayerAttention,
    layers,
    quantize_logits,
    row_blocks,
    watch_attention,
)
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_curves
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Item, Mean, Published, Record, Records
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.text import WindowSuite
from diffmegatron.section import Count

LOGITS, HIDDEN = "attention logits", "hidden states"
RANKS = (1, 2, 3, 10, 100)
_TABLE = "3B, table 5"
_FULL = "as they are"
_PAPER = {
    LOGITS: ((38.8, 38.8, 37.3, 32.0, 27.4, 3.3), (318.0, 308.2, 304.9, 284.7, 251.5, 5.4)),
    HIDDEN: (
        (1688.2, 1672.5, 1672.1, 1624.3, 740.9, 1.2),
        (3608.6, 3607.4, 3603.6, 3552.1, 2448.2, 0.6),
    ),
}
_NAMES = (*(f"top-{rank}" for rank in RANKS), "median")
# A float32 has 31 bits without its sign: the upper 15 bits are the number of a magnitude's bin, and
# the lower 16 bits are the position within the bin.
_LOW_BITS = 16
_BINS, _WITHIN = 1 << 15, 1 << _LOW_BITS


class Outliers(WindowSuite):
    """Exact largest and median magnitudes of attention logits and of the outputs of layers.

    The logits are those of all query heads (signal and noise heads) before the softmax, without
    masked entries. The largest 100 magnitudes and the exact median are stored. There are too many
    values to store, so the median needs two passes: the first counts magnitudes by bin, and the
    second counts the magnitudes in the median's bin by position within the bin.
    """

    name = "outliers"
    direction = "lower"
    reads_attention = True
    title = "Activation outliers"
    description = (
        "The k-th largest magnitude (top-k) and the median of attention logits before the "
        "softmax, and of the layers' outputs (hidden states), over all tokens, heads and "
        "layers. Large outliers make quantisation lossy. They are extremes of the whole text, "
        "so they have no intervals."
    )
    passes = ("largest values", "median")
    published = tuple(
        Published(f"{of}, {name}", differential, transformer, _TABLE)
        for of, pair in _PAPER.items()
        for name, differential, transformer in zip(_NAMES, *pair, strict=True)
    )

    tokens: Count = Field(default=400_000, description="largest number of tokens, as in the paper")

    @override
    def items(self, target: Target) -> list[Item]:
        found: list[Item] = []
        left = self.tokens
        for _, text in self.texts():
            for window in self.windows(text, target):
                ids = [target.start_token, *window][:left]
                left -= len(ids)
                if ids:
                    found.append(Item(f"first/{len(found)}", len(ids), (ids, None)))
        return found

    @override
    def follow_ups(self, target: Target, records: Records) -> list[Item]:
        """Return an item of the second pass for each window, with the bins of the medians."""
        bins = {
            of: _median_bins(_summed([record[of]["bins"] for record in records], _BINS))
            for of in (LOGITS, HIDDEN)
        }
        return [
            Item(f"second/{number}", item.tokens, (item.content[0], bins))
            for number, item in enumerate(self.items(target))
        ]

    @override
    @torch.no_grad()
    def score(self, model: Model, item: Item) -> Record:
        """Return counts of the magnitudes of one window; in the first pass also the 100 largest."""
        ids, bins = item.content
        counters = {of: _Counter(None if bins is None else bins[of], of) for of in (LOGITS, HIDDEN)}

        def see_logits(layer: LayerAttention) -> None:
            for first, end in layer.blocks():
                logits = layer.logits(first, end)
                counters[LOGITS].add(logits[logits != -torch.inf])

        def see_hidden(_: nn.Module, __: tuple, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, Tensor)
            for first, end in row_blocks(1, hidden.shape[1]):
                counters[HIDDEN].add(hidden[0, first:end].flatten())

        with ExitStack() as stack:
            stack.enter_context(watch_attention(model, see_logits))
            for layer in layers(model):
                stack.callback(layer.register_forward_hook(see_hidden).remove)
            model.network.base_model(model.batch(ids), use_cache=False)
        return {of: counter.record() for of, counter in counters.items()}

    @override
    def totals(self, records: Records) -> dict[str, float]:
        found: dict[str, float] = {}
        for of in (LOGITS, HIDDEN):
            first = [record[of] for record in records if "top" in record[of]]
            second = [record[of] for record in records if "within" in record[of]]
            largest = sorted((value for each in first for value in each["top"]), reverse=True)
            found |= {f"{of}, top-{n}": largest[n - 1] for n in RANKS if n <= len(largest)}
            counts = _summed([each["bins"] for each in first], _BINS)
            found[f"{of}, median"] = _median(counts, second)
        return found


class _Counter:
    """Counts of magnitudes: by bin if ``bins`` is None, or by position within each of ``bins``."""

    def __init__(self, bins: Sequence[int] | None, name: str) -> None:
        self._wanted, self._name = bins, name
        self._top = torch.zeros(0)
        size = _BINS if bins is None else _WITHIN
        self._counts = {each: np.zeros(size, np.int64) for each in bins or (0,)}

    def add(self, values: Tensor) -> None:
        magnitudes = values.abs().float()
        if not magnitudes.isfinite().all():
            raise NotFiniteError(f"{self._name} are not finite")
        bits = magnitudes.view(torch.int32)
        if self._wanted is not None:
            for each, counts in self._counts.items():
                low = bits[bits >> _LOW_BITS == each] & (_WITHIN - 1)
                counts += torch.bincount(low, minlength=_WITHIN).cpu().numpy()
            return
        self._counts[0] += torch.bincount(bits >> _LOW_BITS, minlength=_BINS).cpu().numpy()
        joined = torch.cat([self._top, magnitudes.topk(min(RANKS[-1], len(magnitudes)))[0].cpu()])
        self._top = joined.topk(min(RANKS[-1], len(joined)))[0]

    def record(self) -> Record:
        if self._wanted is None:
            return {"top": self._top.tolist(), "bins": _packed(self._counts[0])}
        return {"within": {str(each): _packed(c) for each, c in self._counts.items()}}


def _summed(packed: Sequence[str], size: int) -> np.ndarray:
    found = np.zeros(size, np.int64)
    for each in packed:
        found += _unpacked(each)
    return found


def _median_bins(counts: np.ndarray) -> list[int]:
    """Return the bins of the two middle values in ascending order; one bin if they share it."""
    return sorted({_place(counts, rank)[0] for rank in _middle(counts)})


def _median(counts: np.ndarray, second: Records) -> float:
    """Return the median from the counts of the first pass and the records of the second pass."""
    values = []
    for rank in _middle(counts):
        chosen, before = _place(counts, rank)
        within = _summed([record["within"][str(chosen)] for record in second], _WITHIN)
        low, _ = _place(within, rank - before)
        values.append(np.int32((chosen << _LOW_BITS) | low).view(np.float32))
    return float(np.mean(values, dtype=np.float64))


def _middle(counts: np.ndarray) -> tuple[int, int]:
    """Return the ranks, from 0, of the two middle values; equal if the number of values is odd."""
    total = int(counts.sum())
    return (total - 1) // 2, total // 2


def _place(counts: np.ndarray, rank: int) -> tuple[int, int]:
    """Return the bin of the value with rank ``rank``, and the number of values in lower bins."""
    ends = np.cumsum(counts)
    chosen = int(np.searchsorted(ends, rank, side="right"))
    return chosen, int(ends[chosen] - counts[chosen])


def _packed(counts: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(counts.astype("<i8").tobytes())).decode()


def _unpacked(text: str) -> np.ndarray:
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i8")
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"its counts cannot be unpacked: {error}") from None


class QuantizedAttention(WindowSuite):
    """Loss on held-out text with unchanged attention logits, and with logits of few ``bits``.

    A logit x becomes s round(x / s) with s = max |x| / (2^(bits - 1) - 1). The maximum is over a
    window and all heads of a layer. *Deviation*: the paper measures HellaSwag's accuracy, and does
    not say over which values it takes the maximum.
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
    bits: tuple[Annotated[int, Field(ge=2, le=16)], ...] = Field(
        default=(8, 6, 4), min_length=1, description="numbers of bits of a logit"
    )

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
