"""The largest attention logit of every layer: the first number to look at when a loss spikes."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from diffmegatron.attention.core import DifferentialCoreAttention, SoftmaxCoreAttention

_QUERIES = 256  # whose logits exist at once


def largest_logits(network: torch.nn.Module, forward: Callable[[], object]) -> dict[int, float]:
    """The largest of q k / sqrt(d) over the pairs that attention sees, on this rank.

    Args:
        network: this rank's, with the twins' core attention.
        forward: runs it over whole sequences; what each layer's attention is given is looked at.

    Returns:
        Per global layer number, over both maps and all heads; NaN where any logit is.
    """
    found: dict[int, float] = {}
    with ExitStack() as hooks:
        for module in network.modules():
            if isinstance(module, DifferentialCoreAttention | SoftmaxCoreAttention):
                hook = module.register_forward_pre_hook(partial(_look, found), with_kwargs=True)
                hooks.callback(hook.remove)
        forward()
    return dict(sorted(found.items()))


def _look(
    found: dict[int, float],
    module: DifferentialCoreAttention | SoftmaxCoreAttention,
    arguments: tuple[Any, ...],
    named: Mapping[str, Any],
) -> None:
    query, key, _, documents = _given(*arguments, **named)
    length, rows = query.shape[:2]
    ends = range(0, length * rows + 1, length) if documents is None else documents.tolist()
    scale = module.softmax_scale or 1 / math.sqrt(query.shape[3])
    # [s, b, heads, d] -> rows end to end [b s, groups, r, d], the keys [b s, groups, d]
    keys = key.transpose(0, 1).flatten(0, 1).float()
    queries = query.transpose(0, 1).flatten(0, 1).float().unflatten(1, (keys.shape[1], -1))
    largest = torch.stack(
        [
            _largest(queries[first:end], keys[first:end]) * scale
            for first, end in pairwise(ends)
            if first < end
        ]
    )
    # The greatest of NaN and a number is NaN to torch.
    value = float(largest.max())
    known = found.get(module.layer_number, -math.inf)
    found[module.layer_number] = math.nan if math.isnan(value + known) else max(value, known)


def _given(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    return query, key, value, attention_mask


def _largest(queries: Tensor, keys: Tensor) -> Tensor:
    """The largest causal product within one document; [s, groups, r, d] and [s, groups, d]."""
    found = []
    for first in range(0, len(queries), _QUERIES):
        part = queries[first : first + _QUERIES]
        products = torch.einsum("qgrd,kgd->grqk", part, keys[: first + len(part)])
        above = torch.ones(products.shape[-2:], dtype=torch.bool, device=keys.device).triu(
            first + 1
        )
        found.append(products.masked_fill(above, -torch.inf).max())
    return torch.stack(found).max()
