"""Scores of a network's heads on text: entropy of their attention, importance by gradient."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, distributed

from diffmegatron.attention.context_parallel.whole_sequence import sequence_of_all_ranks
from diffmegatron.attention.self_attention import SelfAttention
from diffmegatron.data.loader import Batch
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.step import forward_backward, forward_only

_QUERIES = 256  # whose attention exists at once

# Per global layer number, float64 [heads of this rank]: sums over what this rank has seen.
Sums = dict[int, Tensor]


class Score(ABC):
    """A way to score heads."""

    # Whether heads with high scores are chosen.
    highest: bool

    @abstractmethod
    def sums(
        self, network: Network, microbatches: Sequence[Batch], parallel_state: ParallelState
    ) -> tuple[Sums, float]:
        """What is to be summed over data and context-parallel ranks, and what that is divided by.

        Args:
            network: this rank's.
            microbatches: of this rank.
            parallel_state: where it stands.
        """


class Entropy(Score):
    """Entropy in nats of a head's attention, the mean over all queries."""

    highest = True

    def sums(
        self, network: Network, microbatches: Sequence[Batch], parallel_state: ParallelState
    ) -> tuple[Sums, float]:
        """As :class:`Score` says; the number of queries.

        Ranks that share sequences gather their queries and keys, and take blocks of them in turn.
        """
        found: Sums = defaultdict(partial(torch.zeros, (), dtype=torch.float64))

        def observe(layer: SelfAttention, query: Tensor, key: Tensor, ends: Tensor | None) -> None:
            found[layer.layer_number] = found[layer.layer_number] + _entropies(
                query, key, ends, layer
            )

        with _watched(network, lambda layer: _observed(layer, partial(observe, layer))):
            forward_only(network, microbatches, parallel_state)
        return dict(found), sum(batch.tokens.numel() for batch in microbatches)


class Gradient(Score):
    """Importance |dL/dxi| of a head, whose output a factor xi at 1 multiplies.

    L is the mean loss of a sequence, and the score the mean over sequences (Michel et al., 2019).
    The weights' gradients come along, and need their memory.
    """

    highest = False

    def sums(
        self, network: Network, microbatches: Sequence[Batch], parallel_state: ParallelState
    ) -> tuple[Sums, float]:
        """As :class:`Score` says; the gradients count every sequence once, over all ranks."""
        found: Sums = defaultdict(partial(torch.zeros, (), dtype=torch.float64))

        def add(layer: SelfAttention, heads: Tensor, gradient: Tensor) -> None:
            by_head = (heads.double() * gradient.double()).unflatten(
                2, (-1, layer.variant.heads.head_dim)
            )
            of_sequences = by_head.sum((0, 3))
            # The sign is that of the whole sequence.
            distributed.all_reduce(of_sequences, group=layer.context_group)
            found[layer.layer_number] = found[layer.layer_number] + of_sequences.abs().sum(0).cpu()

        with _watched(network, lambda layer: _differentiated(layer, partial(add, layer))):
            forward_backward(_Plain(network), microbatches, parallel_state)
        network.zero_grad(set_to_none=True)
        # forward_backward multiplies the loss by the ranks over which DeepSpeed would average, and
        # each of those that share a sequence has found all of it.
        ranks = parallel_state.data_size * parallel_state.context_size
        scale = 1 / (ranks * parallel_state.context_size)
        return {layer: value * scale for layer, value in found.items()}, 1 / ranks


class _Plain:
    """The network instead of the ZeRO engine: gradients and no optimizer."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        return self.network(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        loss.backward()


@contextmanager
def _watched(
    network: Network, watch: Callable[[SelfAttention], Callable[[], object]]
) -> Iterator[None]:
    """Watches every layer of attention; ``watch`` gives what ends it."""
    with ExitStack() as stack:
        for module in network.modules():
            if isinstance(module, SelfAttention):
                stack.callback(watch(module))
        yield


def _observed(
    layer: SelfAttention, observer: Callable[[Tensor, Tensor, Tensor | None], None]
) -> Callable[[], object]:
    layer.observer = observer
    return lambda: setattr(layer, "observer", None)


def _differentiated(
    layer: SelfAttention, add: Callable[[Tensor, Tensor], None]
) -> Callable[[], object]:
    """Calls ``add`` with the heads' outputs [s, b, heads * d] and their gradient."""

    def watch(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        heads = inputs[0]
        heads.register_hook(partial(add, heads.detach()))

    return layer.linear_proj.register_forward_pre_hook(watch).remove


@torch.no_grad()
def _entropies(
    query: Tensor, key: Tensor, documents: Tensor | None, layer: SelfAttention
) -> Tensor:
    """Summed over this rank's share of the queries, float64 [heads]."""
    group = layer.context_group
    if group.size() > 1:
        query, key = (sequence_of_all_ranks(x, group) for x in (query, key))
    length, rows = query.shape[:2]
    ends = range(0, length * rows + 1, length) if documents is None else documents.tolist()
    # Rows end to end [b s, heads, d].
    queries, keys = (x.transpose(0, 1).flatten(0, 1).float() for x in (query, key))
    queries = queries / math.sqrt(query.shape[3])
    blocks = [
        (first, start, min(start + _QUERIES, end))
        for first, end in pairwise(ends)
        for start in range(first, end, _QUERIES)
    ]
    sums = torch.zeros(query.shape[2], dtype=torch.float64)
    for mine, theirs in layer.variant.heads.meetings(key.shape[2]):
        for first, start, last in blocks[group.rank() :: group.size()]:
            scores = torch.einsum(
                "qhd,kd->hqk", queries[start:last, mine], keys[first:last, theirs]
            )
            later = torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(later.triu(1 + start - first), -torch.inf)
            sums[mine] += torch.special.entr(scores.softmax(-1)).sum((1, 2)).double().cpu()
    return sums
