"""Mixture of weighted sources (corpora): the source of each sample of a run.

Unlike Megatron's ``BlendedDataset``, :class:`Mixture` stores no array with an entry for each
sample: it descends a binary tree over the sources. Among the first n samples, the count of each
source deviates from its exact share by at most one sample per level of the tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class _Node:
    """Inner node of the tree, which divides a stream of samples between two groups of sources.

    Of the first n samples of the stream, floor(n * ``share``) belong to the left group. A group
    with a single source is stored as the index of this source.
    """

    share: Fraction
    left: "_Node | int"
    right: "_Node | int"


class Mixture:
    """Assignment of the samples of a run to its sources (corpora), in proportion to ``weights``.

    Raises:
        ValueError: a weight is negative, or all are zero.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if min(weights, default=0) < 0 or sum(weights) <= 0:
            raise ValueError(f"weights {list(weights)} must be at least 0 and not all zero")
        exact = [Fraction(weight).limit_denominator(1 << 40) for weight in weights]
        self._size = len(exact)
        self._tree = _build([n for n in range(self._size) if exact[n]], exact)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the index of a sample's source, and the sample's number in this source."""
        node = self._tree
        while isinstance(node, _Node):
            before = _floor(index, node.share)
            if _floor(index + 1, node.share) > before:
                node, index = node.left, before
            else:
                node, index = node.right, index - before
        return node, index

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first ``samples`` samples of the run belong to each source."""
        counts = [0] * self._size
        pending: list[tuple[_Node | int, int]] = [(self._tree, samples)]
        while pending:
            node, count = pending.pop()
            if isinstance(node, int):
                counts[node] = count
                continue
            left = _floor(count, node.share)
            pending += [(node.left, left), (node.right, count - left)]
        return counts


def _build(sources: list[int], weights: list[Fraction]) -> _Node | int:
    if len(sources) == 1:
        return sources[0]
    middle = len(sources) // 2
    left, right = sources[:middle], sources[middle:]
    total = sum(weights[n] for n in sources)
    share = Fraction(sum(weights[n] for n in left), total)
    return _Node(share, _build(left, weights), _build(right, weights))


def _floor(index: int, share: Fraction) -> int:
    return index * share.numerator // share.denominator
