"""Attention logits and maps of a running network, in blocks of rows.

This module replaces the attention function of ``transformers``. The replacement receives the
queries and keys of a layer, and the layer's variant combines its softmax maps. Memory is needed for
the queries and keys of one layer, and for one block of rows. A block has about 32 MiB of float32
logits (or one row of every head, if that is more), and needs a few times as much temporarily.
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
    """Queries and keys of one call of the attention function.

    Attributes:
        query: rotated queries [queries, s, d].
        key: rotated keys [keys, s, d]; consecutive queries share a key.
        scaling: factor of the products of queries and keys.
    """

    query: Tensor
    key: Tensor
    scaling: float

    def logits(self, first: int, end: int) -> Tensor:
        """Return the logits of the rows from ``first`` to ``end``, float32 [queries, rows, end].

        Logits of later keys are -inf.
        """
        query = self.query[:, first:end].float().unflatten(0, (len(self.key), -1))
        logits = torch.einsum("kqrd,ktd->kqrt", query, self.key[:, :end].float()) * self.scaling
        future = torch.ones(end - first, end, dtype=torch.bool, device=logits.device)
        return logits.flatten(0, 1).masked_fill(future.triu(first + 1), -torch.inf)


@dataclass(frozen=True)
class Layer:
    """One layer's attention in one forward pass of a single text.

    Attributes:
        number: number of the layer, from 0.
        module: attention module.
        hidden: input of the module, [s, hidden_size].
        calls: all queries in the order of ``q_proj``'s rows.
        variant: kind of attention of the layer.
    """

    number: int
    module: nn.Module
    hidden: Tensor
    calls: tuple[Call, ...]
    variant: Variant

    @property
    def rows(self) -> int:
        """Number s of tokens of the text."""
        return len(self.hidden)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Return all rows in blocks whose logits fit into ``BLOCK_BYTES``."""
        return row_blocks(sum(len(call.query) for call in self.calls), self.rows)

    def logits(self, first: int, end: int) -> Tensor:
        """Return the logits of all query heads, float32 [queries, rows, end].

        Logits of later keys are -inf.
        """
        return torch.cat([call.logits(first, end) for call in self.calls])

    def maps(self, first: int, end: int) -> Tensor:
        """Return the maps after subtraction, float32 [heads, rows, end]."""
        return self.subtracted(self.logits(first, end).softmax(-1), first, end)

    def subtracted(self, softmax: Tensor, first: int, end: int) -> Tensor:
        """Return :meth:`maps`, given the softmax of the logits, [queries, rows, end]."""
        return self.variant.subtracted_maps(self.module, softmax, self.hidden[first:end])


def row_blocks(heads: int, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first and end row of each block of square maps.

    The logits of all heads in a block fit into ``BLOCK_BYTES``, unless a single row is larger.
    """
    step = max(1, BLOCK_BYTES // (_FLOAT32 * heads * rows))
    return ((first, min(first + step, rows)) for first in range(0, rows, step))


@contextmanager
def watched(model: Model, watch: Callable[[Layer], object]) -> Iterator[None]:
    """Call ``watch`` with each layer after its attention, in all forward passes of the context.

    Every forward pass must have a single text and no key-value cache.

    Raises:
        UserError: the kind of attention is unknown, or attention is limited to a window.
    """
    variant, calls = model.target.variant, list[Call]()

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        _check(model, options)
        # Some classes call attention twice with the same queries, for the halves of the values.
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
    """Round attention logits to ``bits`` bits, relative to their largest absolute value (absmax).

    Every forward pass must have a single text.

    A logit x becomes s round(x / s) with s = max |x| / (2^(bits - 1) - 1). The maximum is over all
    queries, heads and visible keys of an attention call. The softmax is computed in float32.

    Raises:
        UserError: the kind of attention is unknown, or attention is limited to a window.
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
    """Return the decoder layers of a network whose kind of attention is known."""
    found: nn.ModuleList = model.network.base_model.layers
    return found


def _largest(logits: Tensor) -> float:
    return float(logits.masked_fill(logits == -torch.inf, 0).abs().max())


@contextmanager
def _attending(network: PreTrainedModel, attend: Callable) -> Iterator[None]:
    """Replace the attention function of a network; ``transformers`` builds no mask for it."""
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
            f"{model.target.name} has a sliding_window of {options['sliding_window']}; this suite "
            "needs models that attend to the whole context"
        )
