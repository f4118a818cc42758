"""The largest attention logit of every layer, the first value to check when the loss spikes."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from diffmegatron.attention.self_attention import SelfAttention

_QUERIES = 256  # Query positions whose logits are in memory at the same time.


def largest_logits(network: torch.nn.Module, forward: Callable[[], object]) -> dict[int, float]:
    """Return the largest attention logit q · k / sqrt(d) of each layer on this rank.

    The maximum is over this rank's heads, all softmax maps of a head, and all unmasked pairs of
    query and key. ``forward`` runs the network on full sequences, without context parallelism.

    Returns:
        Largest logit by global layer number, from 1; NaN if a logit of the layer is NaN.
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
    """Update a layer's largest logit in ``found`` with one microbatch; the layer calls this.

    Args:
        query: queries after rotation, [s, b, query heads, d].
        key: keys after rotation, [s, b, key heads, d].
        documents: start of each document in the concatenated sequences, then the total length
            b * s; None if attention crosses documents.
    """
    length, rows = query.shape[:2]
    ends = range(0, length * rows + 1, length) if documents is None else documents.tolist()
    # [s, b, heads, d] to [b * s, heads, d]: the sequences of the batch one after the other.
    queries, keys = (x.transpose(0, 1).flatten(0, 1).float() for x in (query, key))
    pairs = [
        (queries[:, query_heads], keys[:, key_head].unsqueeze(1))
        for key_head, query_heads in enumerate(layer.variant.heads.query_slices(key.shape[2]))
    ]
    largest = torch.stack(
        [
            _largest(q[first:end], k[first:end])
            for q, k in pairs
            for first, end in pairwise(ends)
            if first < end
        ]
    )
    # Torch's maximum of NaN and a number is NaN; Python's depends on the order.
    value = float(largest.max()) / math.sqrt(query.shape[3])
    known = found.get(layer.layer_number, -math.inf)
    found[layer.layer_number] = math.nan if math.isnan(value + known) else max(value, known)


def _largest(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest q · k of one document under the causal mask; 0-dim.

    The ``queries`` [tokens, heads, d] share the key head ``keys`` [tokens, 1, d].
    """
    found = []
    for first in range(0, len(queries), _QUERIES):
        part = queries[first : first + _QUERIES]
        products = torch.einsum("qhd,kgd->hqk", part, keys[: first + len(part)])
        above = torch.ones(products.shape[-2:], dtype=torch.bool, device=keys.device).triu(
            first + 1
        )
        found.append(products.masked_fill(above, -torch.inf).max())
    return torch.stack(found).max()
