"""The source of the i-th sample, and its number within that source.

Both are closed forms of (weights, i), so nothing is stored and samples can be read in any order.
After any number of samples, the count of each source deviates from its share by at most one sample
per level of a binary tree over the sources. Megatron's BlendedDataset stores the same information
in two arrays as long as the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class _Node:
    """A split of a stream of samples between two halves of the sources, in the ratio of weights.

    Of the first n samples floor(n p) go left, which is the most even distribution.
    """

    share: Fraction
    left: "_Node | int"
    right: "_Node | int"


class Mixture:
    """The order in which samples are drawn from sources.

    Args:
        weights: relative weight of each source.

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
        """Return the source of sample ``index``, and the number of its samples before ``index``."""
        node = self._tree
        while isinstance(node, _Node):
            before = _floor(index, node.share)
            if _floor(index + 1, node.share) > before:
                node, index = node.left, before
            else:
                node, index = node.right, index - before
        return node, index

    def counts(self, samples: int) -> list[int]:
        """Return the number of samples of each source among the first ``samples``."""
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
