"""Which source the i-th sample comes from, and which of that source's samples it is.

Both are closed forms of (weights, i): nothing is stored, any sample can be asked for, and after
any number of samples each source has given its share to within one sample per level of a binary
tree over the sources. Megatron's BlendedDataset stores the same answer as two arrays that are as
long as the run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class _Node:
    """Splits a stream of samples between two halves of the sources in the ratio of weights.

    Of the first n samples, floor(n p) go left: the most even spread that there is.
    """

    share: Fraction
    left: "_Node | int"
    right: "_Node | int"


class Mixture:
    """The order in which sources are drawn.

    Args:
        weights: one per source, in any unit.

    Raises:
        ValueError: a weight is negative, or all are zero.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if min(weights, default=0) < 0 or sum(weights) <= 0:
            raise ValueError(f"weights {list(weights)} are no shares of anything")
        exact = [Fraction(weight).limit_denominator(1 << 40) for weight in weights]
        self._size = len(exact)
        self._tree = _build([n for n in range(self._size) if exact[n]], exact)

    def locate(self, index: int) -> tuple[int, int]:
        """Source of sample ``index``, and how many samples of that source came before it."""
        node = self._tree
        while isinstance(node, _Node):
            before = _floor(index, node.share)
            if _floor(index + 1, node.share) > before:
                node, index = node.left, before
            else:
                node, index = node.right, index - before
        return node, index

    def counts(self, samples: int) -> list[int]:
        """How many of the first ``samples`` samples come from each source."""
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
