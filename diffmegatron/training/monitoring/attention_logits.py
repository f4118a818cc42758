"""The largest attention logits q · k / sqrt(d) of layers, observed in forward passes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from diffmegatron.model.layers.self_attention import SelfAttention

_QUERIES = 256  # Query positions whose logits are in memory at the same time.


@contextmanager
def observed_logits(network: torch.nn.Module, *, once: bool = False) -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary into which forward passes in the ``with`` block write largest logits.

    It maps the global number of each layer on this rank, from 1, to the largest logit of each
    softmax map, float32 [maps], rounded to the dtype of the queries. The maximum is over this
    rank's heads and all unmasked pairs of query and key; it is NaN if a logit is NaN. With
    ``once``, only the first pass of each layer is observed. The passes must have full sequences,
    without context parallelism.
    """
    found: dict[int, Tensor] = {}
    layers = [module for module in network.modules() if isinstance(module, SelfAttention)]
    for layer in layers:
        layer.observer = partial(_observe, found, layer, once)
    try:
        yield found
    finally:
        for layer in layers:
            layer.observer = None


@torch.no_grad()
def _observe(
    found: dict[int, Tensor],
    layer: SelfAttention,
    once: bool,
    query: Tensor,
    key: Tensor,
    documents: Tensor | None,
) -> None:
    """Update the largest logits of ``layer`` in ``found`` with the logits of one microbatch.

    Args:
        query: queries after rotation, [s, b, query heads, d].
        key: keys after rotation, [s, b, key heads, d].
        documents: starts of the documents in the concatenated sequences, followed by the total
            length; None if attention crosses documents.
    """
    length, rows = query.shape[:2]
    ends = range(0, length * rows + 1, length) if documents is None else documents.tolist()
    # [s, b, heads, d] to [b * s, heads, d]: the sequences of the batch one after the other.
    queries, keys = (x.transpose(0, 1).flatten(0, 1) for x in (query, key))
    by_key = [
        torch.stack(
            [
                _largest(queries[first:end, query_heads], keys[first:end, key_head, None])
                for first, end in pairwise(ends)
                if first < end
            ]
        ).amax(0)
        for key_head, query_heads in enumerate(layer.kind.heads.query_slices(key.shape[2]))
    ]
    by_query = torch.cat(by_key).float() / math.sqrt(query.shape[3])
    # The queries of a block belong to the matrix q, or to the matrices q1 and q2 of two maps.
    maps = [each.matrix for each in layer.kind.matrices if each.matrix.startswith("q")]
    by_block = by_query.unflatten(0, (-1, len(maps)))
    largest = torch.stack(
        [
            by_block[:, [n for n, each in enumerate(maps) if each == name]].amax()
            for name in sorted({*maps})
        ]
    )
    known = found.get(layer.layer_number, largest)
    found[layer.layer_number] = torch.maximum(known, largest)
    if once:
        layer.observer = None


def _largest(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the largest q · k of each head in one document under the causal mask, [heads].

    The ``queries`` [tokens, heads, d] share the key head ``keys`` [tokens, 1, d].
    """
    found = []
    for first in range(0, len(queries), _QUERIES):
        part = queries[first : first + _QUERIES]
        products = torch.einsum("qhd,kgd->hqk", part, keys[: first + len(part)])
        above = torch.ones(products.shape[-2:], dtype=torch.bool, device=keys.device).triu(
            first + 1
        )
        found.append(products.masked_fill_(above, -torch.inf).amax((1, 2)))
    return torch.stack(found).amax(0)
