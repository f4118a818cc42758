"""Attention of a network as it runs: logits and maps, row block by row block.

An attention function of ``transformers`` that replaces the usual one sees queries and
keys as attention gets them, for any kind of attention; its variant says how the maps combine.
At no time does more exist than a layer's queries and keys and a block of rows: about 32 MiB of
float32 logits, or one row of every head where that is more, and a few times that in passing.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diffmegatron.attention.variants import Variant
from diffmegatron.errors import UserError
from diffmegatron.evaluation.model import Model

BLOCK_BYTES = 1 << 25
_FLOAT32 = 4
_NAME = "diffmegatron_evaluation"
_USUAL = "sdpa"


class Call(NamedTuple):
    """Queries that meet keys.

    Attributes:
        query: [queries, s, d], rotated.
        key: [keys, s, d], rotated; consecutive queries share one.
        scaling: of their products.
    """

    query: Tensor
    key: Tensor
    scaling: float

    def logits(self, first: int, end: int) -> Tensor:
        """Of the rows from ``first`` to ``end``: float32 [queries, rows, end], -inf in the future.

        Computed in float32 from what the network has.
        """
        query = self.query[:, first:end].float().unflatten(0, (len(self.key), -1))
        logits = torch.einsum("kqrd,ktd->kqrt", query, self.key[:, :end].float()) * self.scaling
        future = torch.ones(end - first, end, dtype=torch.bool, device=logits.device)
        return logits.flatten(0, 1).masked_fill(future.triu(first + 1), -torch.inf)


@dataclass(frozen=True)
class Layer:
    """One layer's attention in one forward pass of a single text.

    Attributes:
        number: of the layer, from 0.
        module: of its attention.
        hidden: what it reads, [s, hidden_size].
        calls: all its queries in the order of ``q_proj``'s rows.
        variant: its kind.
    """

    number: int
    module: nn.Module
    hidden: Tensor
    calls: tuple[Call, ...]
    variant: Variant

    @property
    def rows(self) -> int:
        """s, the tokens of the text."""
        return len(self.hidden)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """All rows, in blocks that keep to the memory."""
        return row_blocks(sum(len(call.query) for call in self.calls), self.rows)

    def logits(self, first: int, end: int) -> Tensor:
        """Of all query heads at the rows from ``first`` to ``end``: float32 [queries, rows, end].

        -inf in the future of a row.
        """
        return torch.cat([call.logits(first, end) for call in self.calls])

    def maps(self, first: int, end: int) -> Tensor:
        """What multiplies the values there, after any subtraction: float32 [heads, rows, end]."""
        return self.subtracted(self.logits(first, end).softmax(-1), first, end)

    def subtracted(self, softmax: Tensor, first: int, end: int) -> Tensor:
        """:meth:`maps` from the softmax of the logits there, [queries, rows, end]."""
        return self.variant.subtracted_maps(self.module, softmax, self.hidden[first:end])


def row_blocks(heads: int, rows: int) -> Iterator[tuple[int, int]]:
    """Rows of square maps in blocks whose logits, of all heads, take ``BLOCK_BYTES`` at most."""
    step = max(1, BLOCK_BYTES // (_FLOAT32 * heads * rows))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


@contextmanager
def watched(model: Model, watch: Callable[[Layer], object]) -> Iterator[None]:
    """Calls ``watch`` with every layer of forward passes of one text each, without a cache.

    Raises:
        UserError: its attention is of no kind that is known, or reaches back only so far.
    """
    variant, calls = model.target.variant, list[Call]()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        _check(model, options)
        # A class may attend twice with the same queries, to either half of the values.
        if not calls or calls[-1].query.data_ptr() != query.data_ptr():
            calls.append(Call(query[0], key[0], options["scaling"]))
        return ALL_ATTENTION_FUNCTIONS[_USUAL](module, query, key, value, mask, **options)

    def end(number: int, module: nn.Module, args: tuple, options: dict, output: object) -> None:
        hidden = options["hidden_states"] if "hidden_states" in options else args[0]
        layer = Layer(number, module, hidden[0], tuple(calls), variant.of_layer(number))
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
def quantized(model: Model, bits: int) -> Iterator[None]:
    """Attention logits rounded to ``bits`` by absmax, in forward passes of one text each.

    A logit x becomes s round(x / s) with s = max |x| / (2^(bits - 1) - 1), the maximum over all
    queries, heads and earlier keys of an attention call; then softmax in float32.

    Raises:
        UserError: as :func:`watched`.
    """
    levels = 2 ** (bits - 1) - 1

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        _check(model, options)
        call, values = Call(query[0], key[0], options["scaling"]), value[0].float()
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

    _ = model.target.variant
    with _attending(model.network, attend):
        yield


def layers(model: Model) -> nn.ModuleList:
    """The decoder layers of a network whose kind of attention is known."""
    found: nn.ModuleList = model.network.base_model.layers
    return found


def _largest(logits: Tensor) -> float:
    return float(logits.masked_fill(logits == -torch.inf, 0).abs().max())


@contextmanager
def _attending(network: PreTrainedModel, attend: Callable) -> Iterator[None]:
    """The network with another attention function, for which no mask is made."""
    usual = network.config._attn_implementation
    ALL_ATTENTION_FUNCTIONS[_NAME] = attend
    network.config._attn_implementation = _NAME
    try:
        yield
    finally:
        network.config._attn_implementation = usual
        del ALL_ATTENTION_FUNCTIONS[_NAME]


def _check(model: Model, options: dict[str, Any]) -> None:
    if options.get("sliding_window") is not None:
        raise UserError(
            f"{model.target.name} attends within a sliding_window of {options['sliding_window']}; "
            "what looks into attention takes models that attend to the whole context"
        )
