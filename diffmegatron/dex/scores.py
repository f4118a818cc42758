"""Scores of attention heads on text: the entropy of their attention, or their importance.

In shapes, s is the number of positions of a sequence on this context-parallel rank, b the number of
sequences in a microbatch, and d the width of a head.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, distributed

from diffmegatron.attention.context_parallel.whole_sequence import sequence_of_all_ranks
from diffmegatron.data.loader import Batch
from diffmegatron.errors import UserError
from diffmegatron.model.layers.self_attention import SelfAttention
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.step import forward_backward, forward_only

# Largest number of queries per head whose attention weights are in memory at once.
_QUERIES = 256

Sums = dict[int, Tensor]
"""Layer -> summed entropies or importances of this tensor-parallel rank's heads, float64 [heads].

Layers are numbered from 1 over all pipeline stages. :func:`entropy_sums` and :func:`gradient_sums`
return these sums and a divisor. The score of a head is the total of its sums over all data- and
context-parallel ranks, divided by the total of the divisors.
"""


def entropy_sums(
    network: Network, microbatches: Sequence[Batch], parallel_state: ParallelState
) -> tuple[Sums, float]:
    """Return sums of attention entropies in nats over queries, and this rank's number of queries.

    With context parallelism, only totals over all context-parallel ranks refer to the same queries.
    """
    total: Sums = {}

    def observe(layer: SelfAttention, query: Tensor, key: Tensor, ends: Tensor | None) -> None:
        _add(total, layer, _sum_entropies(query, key, ends, layer))

    with _hooked(network, lambda layer: _set_observer(layer, partial(observe, layer))):
        forward_only(network, microbatches, parallel_state)
    return total, sum(batch.tokens.numel() for batch in microbatches)


def gradient_sums(
    network: Network, microbatches: Sequence[Batch], parallel_state: ParallelState
) -> tuple[Sums, float]:
    """Return sums of the importances |dL/dxi| of heads (Michel et al., 2019), and their divisor.

    xi = 1 is a factor by which a head's output is multiplied. L is the mean loss of a sequence.
    A head's score is the mean of |dL/dxi| over all sequences, weighted by their numbers of tokens
    with loss.

    Raises:
        UserError: If no token has a loss.
    """
    total: Sums = {}

    def add(layer: SelfAttention, heads: Tensor, gradient: Tensor) -> None:
        by_head = (heads.double() * gradient.double()).unflatten(2, (-1, layer.kind.heads.head_dim))
        by_sequence = by_head.sum((0, 3))
        # The importance is the absolute value of the sum over all context-parallel ranks.
        distributed.all_reduce(by_sequence, group=layer.context_group)
        _add(total, layer, by_sequence.abs().sum(0).cpu())

    with _hooked(network, lambda layer: _add_gradient_hook(layer, partial(add, layer))):
        loss = forward_backward(_EngineWithoutOptimizer(network), microbatches, parallel_state)
    network.zero_grad(set_to_none=True)
    if not loss.tokens:
        raise UserError(
            "the sequences have no label with loss, so no head has an importance; give --data with "
            "labels, or --method entropy"
        )
    # `scale` removes two factors. forward_backward multiplies the loss by `ranks`, and every
    # context-parallel rank has added the importance of the whole sequence.
    ranks = parallel_state.data_size * parallel_state.context_size
    scale = 1 / (ranks * parallel_state.context_size)
    return {layer: value * scale for layer, value in total.items()}, 1 / ranks


def _add(total: Sums, layer: SelfAttention, values: Tensor) -> None:
    number = layer.layer_number
    total[number] = total[number] + values if number in total else values


class _EngineWithoutOptimizer:
    def __init__(self, network: Network) -> None:
        self.network = network

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        return self.network(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()


@contextmanager
def _hooked(
    network: Network, add_hook: Callable[[SelfAttention], Callable[[], object]]
) -> Iterator[None]:
    """Add a hook to every attention layer in a ``with`` block.

    ``add_hook`` adds the hook to a layer, and returns a function that removes it.
    """
    with ExitStack() as stack:
        for module in network.modules():
            if isinstance(module, SelfAttention):
                stack.callback(add_hook(module))
        yield


def _set_observer(
    layer: SelfAttention, observer: Callable[[Tensor, Tensor, Tensor | None], None]
) -> Callable[[], object]:
    layer.observer = observer
    return lambda: setattr(layer, "observer", None)


def _add_gradient_hook(
    layer: SelfAttention, add: Callable[[Tensor, Tensor], None]
) -> Callable[[], object]:
    """Make backward passes call ``add`` with the outputs of a layer's heads and their gradient.

    Both are [s, b, heads * d].
    """

    def hook(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        heads = inputs[0]
        heads.register_hook(partial(add, heads.detach()))

    return layer.linear_proj.register_forward_pre_hook(hook).remove


@torch.no_grad()
def _sum_entropies(
    query: Tensor, key: Tensor, documents: Tensor | None, layer: SelfAttention
) -> Tensor:
    """Return the sums of the entropies over this rank's share of the queries, float64 [heads].

    ``query`` is [s, b, heads, d], and ``key`` is [s, b, key heads, d]. ``documents`` has the
    boundaries of packed documents, as positions in the concatenation of the b whole sequences. It
    is None if every sequence is one document.
    """
    group = layer.context_group
    if group.size() > 1:
        query, key = (sequence_of_all_ranks(x, group) for x in (query, key))
    length, rows = query.shape[:2]
    ends = range(0, length * rows + 1, length) if documents is None else documents.tolist()
    # Concatenate the whole sequences of the batch: [b * length, heads, d].
    queries, keys = (x.transpose(0, 1).flatten(0, 1).float() for x in (query, key))
    queries = queries / math.sqrt(query.shape[3])
    blocks = [
        (first, start, min(start + _QUERIES, end))
        for first, end in pairwise(ends)
        for start in range(first, end, _QUERIES)
    ]
    sums = torch.zeros(query.shape[2], dtype=torch.float64)
    for key_head, query_heads in enumerate(layer.kind.heads.query_slices(key.shape[2])):
        for first, start, last in blocks[group.rank() :: group.size()]:
            scores = torch.einsum(
                "qhd,kd->hqk", queries[start:last, query_heads], keys[first:last, key_head]
            )
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(later.triu(1 + start - first), -torch.inf)
            sums[query_heads] += torch.special.entr(scores.softmax(-1)).sum((1, 2)).double().cpu()
    return sums
