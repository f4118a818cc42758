"""The largest attention logit of every layer, the first number to check when a loss spikes."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from diffmegatron.attention.self_attention import SelfAttention

_QUERIES = 256  # Number of queries whose logits are in memory at once.


def largest_logits(network: torch.nn.Module, forward: Callable[[], object]) -> dict[int, float]:
    """Return the largest q k / sqrt(d) of each layer on this rank, over the visible pairs.

    Args:
        network: network of this rank.
        forward: runs the network on whole sequences.

    Returns:
        Largest logit over all maps and heads by global layer number; NaN if any logit is NaN.
    """
    found: dict[int, float] = {}
    layers = [module for module in network.modules() if isinstance(module, SelfAttention)]
    for layer in layers:
        layer.observer = partial(_observe, found, layer)
    try:
        forward()
    finally:
        for layer in layers:
            layer.observer = None
    return dict(sorted(found.items()))


def _observe(
    found: dict[int, float],
    layer: SelfAttention,
    query: Tensor,
    key: Tensor,
    documents: Tensor | None,
) -> None:
    length, rows = query.shape[:2]
    ends = range(0, length * rows + 1, length) if documents is None else documents.tolist()
    # Concatenate the rows: [b s, heads, d].
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
    # Torch's maximum of NaN and a number is NaN.
    value = float(largest.max()) / math.sqrt(query.shape[3])
    known = found.get(layer.layer_number, -math.inf)
    found[layer.layer_number] = math.nan if math.isnan(value + known) else max(value, known)


def _largest(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest causal q k of one document; queries [s, heads, d], keys [s, 1, d]."""
    found = []
    for first in range(0, len(queries), _QUERIES):
        part = queries[first : first + _QUERIES]
        products = torch.einsum("qhd,kgd->hqk", part, keys[: first + len(part)])
        above = torch.ones(products.shape[-2:], dtype=torch.bool, device=keys.device).triu(
            first + 1
        )
        found.append(products.masked_fill(above, -torch.inf).max())
    return torch.stack(found).max()
