"""The largest attention logit of every layer: the first number to look at when a loss spikes."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from diffmegatron.attention.self_attention import SelfAttention

_QUERIES = 256  # whose logits exist at once


def largest_logits(network: torch.nn.Module, forward: Callable[[], object]) -> dict[int, float]:
    """The largest of q k / sqrt(d) over the pairs that attention sees, on this rank.

    Args:
        network: this rank's.
        forward: runs it over whole sequences; what each layer's attention is given is looked at.

    Returns:
        Per global layer number, over all maps and heads; NaN where any logit is.
    """
    found: dict[int, float] = {}
    layers = [module for module in network.modules() if isinstance(module, SelfAttention)]
    for layer in layers:
        layer.observer = partial(_look, found, layer)
    try:
        forward()
    finally:
        for layer in layers:
            layer.observer = None
    return dict(sorted(found.items()))


def _look(
    found: dict[int, float],
    layer: SelfAttention,
    query: Tensor,
    key: Tensor,
    documents: Tensor | None,
) -> None:
    length, rows = query.shape[:2]
    ends = range(0, length * rows + 1, length) if documents is None else documents.tolist()
    # Rows end to end [b s, heads, d].
    queries, keys = (x.transpose(0, 1).flatten(0, 1).float() for x in (query, key))
    pairs = [
        (queries[:, mine], keys[:, theirs].unsqueeze(1))
        for mine, theirs in layer.variant.heads.meetings(key.shape[2])
    ]
    largest = torch.stack(
        [
            _largest(q[first:end], k[first:end])
            for q, k in pairs
            for first, end in pairwise(ends)
            if first < end
        ]
    )
    # The greatest of NaN and a number is NaN to torch.
    value = float(largest.max()) / math.sqrt(query.shape[3])
    known = found.get(layer.layer_number, -math.inf)
    found[layer.layer_number] = math.nan if math.isnan(value + known) else max(value, known)


def _largest(queries: Tensor, keys: Tensor) -> Tensor:
    """The largest causal product within one document; [s, heads, d] and their key [s, 1, d]."""
    found = []
    for first in range(0, len(queries), _QUERIES):
        part = queries[first : first + _QUERIES]
        products = torch.einsum("qhd,kgd->hqk", part, keys[: first + len(part)])
        above = torch.ones(products.shape[-2:], dtype=torch.bool, device=keys.device).triu(
            first + 1
        )
        found.append(products.masked_fill(above, -torch.inf).max())
    return torch.stack(found).max()
