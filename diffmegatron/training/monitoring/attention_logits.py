"""The largest attention logits q · k / sqrt(d) of layers, observed in forward passes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.model.layers.self_attention import SelfAttention

# Number of logits in memory at the same time; at most twice as many if documents are short.
_LOGITS = 2**25


@contextmanager
def observed_logits(network: torch.nn.Module, *, once: bool = False) -> Iterator[dict[int, Tensor]]:
    """Yield a dictionary into which forward passes in the ``with`` block write largest logits.

    It maps the global number of each layer on this rank, from 1, to the largest logit of each
    softmax map, float32 [1 or 2], rounded to the dtype of the queries. The maximum is over this
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
    ends = torch.arange(0, length * rows + 1, length) if documents is None else documents.cpu()
    positions = torch.arange(length * rows, dtype=ends.dtype)
    starts = ends[torch.searchsorted(ends, positions, right=True) - 1]
    # [s, b, heads, d] to [b * s, blocks, heads of a block, d]: the sequences one after the other.
    heads = layer.kind.heads
    keys_per_block = heads.keys // heads.blocks
    keys = key.transpose(0, 1).flatten(0, 1).unflatten(1, (-1, keys_per_block))
    queries = query.transpose(0, 1).flatten(0, 1).unflatten(1, (keys.shape[1], -1))
    reach, window = int(ends.diff().max()), layer.kind.window
    if window is not None:
        starts, reach = starts.maximum(positions + 1 - window), min(reach, window)
    by_query = torch.cat(
        [
            _largest(queries[:, :, of_key], keys[:, :, number], starts, reach)
            for number, of_key in enumerate(heads.query_slices(keys_per_block))
        ]
    )
    by_query = by_query.float() / math.sqrt(query.shape[3])
    largest = torch.stack([by_query[each].amax() for each in _maps(layer.kind)])
    known = found.get(layer.layer_number, largest)
    found[layer.layer_number] = torch.maximum(known, largest)
    if once:
        layer.observer = None


def _maps(kind: AttentionKind) -> list[list[int]]:
    """Return, for each softmax map, the numbers of its query heads among those of a block.

    Each matrix with queries has one map. More than two count as one.
    """
    parts = [part for part, count in kind.heads.rows for _ in range(count)]
    names = [each.matrix for part, each in zip(parts, kind.matrices, strict=True) if part == "q"]
    maps = [[n for n, each in enumerate(names) if each == name] for name in dict.fromkeys(names)]
    return maps if len(maps) <= 2 else [[*range(len(names))]]


def _largest(queries: Tensor, keys: Tensor, starts: Tensor, reach: int) -> Tensor:
    """Return the largest q · k of each query head of a block under the causal mask, [heads].

    Args:
        queries: [tokens, blocks, heads, d].
        keys: [tokens, blocks, d]; a key is shared by the query heads of its block.
        starts: first token that each token sees, [tokens] on the CPU.
        reach: largest number of tokens that a token sees.
    """
    tokens, blocks, heads = queries.shape[:3]
    rows = min(reach, max(1, _LOGITS // (blocks * heads * reach)))
    first_keys, starts = starts.tolist(), starts.to(keys.device)
    positions = torch.arange(tokens, device=keys.device)
    found = []
    for first in range(0, tokens, rows):
        chunk, seen = slice(first, first + rows), slice(first_keys[first], first + rows)
        products = torch.einsum("qbhd,kbd->bhqk", queries[chunk], keys[seen])
        key, query = positions[seen], positions[chunk, None]
        hidden = (key > query) | (key < starts[chunk, None])
        found.append(products.masked_fill_(hidden, -torch.inf).amax((0, 2, 3)))
    return torch.stack(found).amax(0)
