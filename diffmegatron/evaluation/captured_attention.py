"""Observation and quantization of the attention logits in a network's forward passes.

This module replaces the attention function of ``transformers``. To save memory, logits and maps are
computed for one block of rows (queries) at a time.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffmegatron.evaluation.head_maps import HeadMaps, maps_of
from diffmegatron.evaluation.model import Model

BLOCK_BYTES = 1 << 25
_FLOAT32 = 4
_NAME = "diffmegatron_evaluation"
_USUAL = "sdpa"


class CapturedCall(NamedTuple):
    """Queries and keys of one call of the attention function, for a text of s tokens.

    d is the width of a head.

    Attributes:
        query: queries after rotary embedding, [query heads, s, d].
        key: keys after rotary embedding, [key heads, s, d]. Consecutive query heads share a key
            head.
        scaling: factor of the dot products of queries and keys.
        window: number of keys that a query sees, its own included; None for all before it.
    """

    query: Tensor
    key: Tensor
    scaling: float
    window: int | None

    def logits(self, first: int, end: int) -> Tensor:
        """Return the logits of queries ``first`` to ``end - 1``.

        They are float32 [query heads, end - first, end], and -inf for keys after the query or
        before its window.
        """
        query = self.query[:, first:end].float().unflatten(0, (len(self.key), -1))
        logits = torch.einsum("kqrd,ktd->kqrt", query, self.key[:, :end].float()) * self.scaling
        every = torch.ones(end - first, end, dtype=torch.bool, device=logits.device)
        hidden = every.triu(first + 1)
        if self.window is not None:
            hidden |= every.tril(first - self.window)
        return logits.flatten(0, 1).masked_fill(hidden, -torch.inf)


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer in one forward pass of a single text of s tokens.

    Attributes:
        number: index of the layer, from 0.
        module: attention module of the layer.
        hidden: input of ``module``, [s, hidden_size].
        call: all query heads. In a ``GroupedDiffAttention`` module, the signal heads precede the
            noise heads.
    """

    number: int
    module: nn.Module
    hidden: Tensor
    call: CapturedCall
    head_maps: HeadMaps

    @property
    def rows(self) -> int:
        """Number of rows of a map, one per token of the text."""
        return len(self.hidden)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (first, end) for each block of rows ``first`` to ``end - 1``."""
        return row_blocks(len(self.call.query), self.rows)

    def logits(self, first: int, end: int) -> Tensor:
        """Return the logits of all query heads, like :meth:`CapturedCall.logits`."""
        return self.call.logits(first, end)

    def maps(self, first: int, end: int) -> Tensor:
        """Return the maps of rows ``first`` to ``end - 1``, float32 [heads, end - first, end].

        A map is the softmax of a head's logits. In differential attention, it is the difference of
        softmax maps that :meth:`HeadMaps.subtracted` computes.
        """
        return self.subtracted(self.logits(first, end).softmax(-1), first, end)

    def subtracted(self, softmax: Tensor, first: int, end: int) -> Tensor:
        """Return :meth:`maps`; ``softmax`` is the softmax of :meth:`logits` for the same rows."""
        return self.head_maps.subtracted(self.module, softmax, self.hidden[first:end])


def _captured(
    module: nn.Module, query: Tensor, key: Tensor, options: Mapping[str, Any]
) -> CapturedCall:
    """Return a call without the repeated query heads of a ``GroupedDiffAttention`` module."""
    heads = getattr(module, "map_heads", None)
    if heads is not None:
        key = key.repeat_interleave(len(query) // len(key), dim=0)[heads]
        query = query[heads]
    return CapturedCall(query, key, options["scaling"], options.get("sliding_window"))


def row_blocks(heads: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each block of maps [heads, rows, rows].

    A block has the rows ``first`` to ``end - 1`` of all heads. A block of several rows has at most
    ``BLOCK_BYTES`` bytes in float32.
    """
    step = max(1, BLOCK_BYTES // (_FLOAT32 * heads * rows))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


@contextmanager
def watch_attention(model: Model, watch: Callable[[LayerAttention], object]) -> Iterator[None]:
    """Call ``watch`` after the attention of each layer in the forward passes of a ``with`` block.

    Every forward pass must have a single text and no key-value cache.
    """
    target, calls = model.target, list[CapturedCall]()
    attention_kinds = target.attention

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        # DiffLlama calls this function for each half of the values, with the same queries and keys.
        if not calls:
            calls.append(_captured(module, query[0], key[0], options))
        return ALL_ATTENTION_FUNCTIONS[_USUAL](module, query, key, value, mask, **options)

    def end(number: int, module: nn.Module, args: tuple, options: dict, output: object) -> None:
        hidden = options["hidden_states"] if "hidden_states" in options else args[0]
        maps = maps_of(target.config, attention_kinds, number)
        layer = LayerAttention(number, module, hidden[0], calls[0], maps)
        calls.clear()
        watch(layer)

    with ExitStack() as stack:
        stack.enter_context(_attending(model.network, attend))
        for number, layer in enumerate(layers(model)):
            attention: Any = layer.self_attn
            hook = partial(end, number)
            stack.callback(attention.register_forward_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def quantize_logits(model: Model, bits: int) -> Iterator[None]:
    """Round the attention logits of all forward passes of a ``with`` block to ``bits`` bits.

    A logit x becomes step * round(x / step), where step is max |x| / (2^(bits - 1) - 1). The
    maximum is over all queries, heads and visible keys of one call of the attention function. Every
    forward pass must have a single text and no key-value cache.
    """
    levels = 2 ** (bits - 1) - 1

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        window = options.get("sliding_window")
        call = CapturedCall(query[0], key[0], options["scaling"], window)
        values = value[0].float()
        blocks = list(row_blocks(len(call.query), call.query.shape[1]))
        largest = max(_largest(call.logits(*block)) for block in blocks)
        step = largest / levels if largest else 1.0
        parts = []
        for block in blocks:
            maps = ((call.logits(*block) / step).round() * step).softmax(-1)
            grouped = maps.unflatten(0, (len(values), -1))
            heads = torch.einsum("kqrt,ktd->kqrd", grouped, values[:, : block[1]])
            parts.append(heads.flatten(0, 1))
        return torch.cat(parts, dim=1).transpose(0, 1)[None].to(query.dtype), None

    # Access to the property raises a UserError if the kind of attention is unknown.
    _ = model.target.attention
    with _attending(model.network, attend):
        yield


def layers(model: Model) -> nn.ModuleList:
    """Return the decoder layers of a network; all supported classes name them ``layers``."""
    found: nn.ModuleList = model.network.base_model.layers
    return found


def _largest(logits: Tensor) -> float:
    return float(logits.masked_fill(logits == -torch.inf, 0).abs().max())


@contextmanager
def _attending(network: PreTrainedModel, attend: Callable) -> Iterator[None]:
    """Replace the attention function of a network by ``attend`` in a ``with`` block.

    The mask is the one of ``sdpa``: None for causal attention to all tokens before the query.
    """
    usual = network.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[_USUAL])
    network.config._attn_implementation = _NAME
    try:
        yield
    finally:
        network.config._attn_implementation = usual
        del ALL_ATTENTION_FUNCTIONS[_NAME]
