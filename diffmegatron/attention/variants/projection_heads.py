"""The order of a layer's heads in the rows of its projections."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Rows = tuple[tuple[Literal["q", "k", "v"], int], ...]


@dataclass(frozen=True)
class Heads:
    """The heads of one layer in the order of the rows of ``linear_qkv``.

    The rows consist of ``blocks`` equal blocks, one per key-value head of the kind. Each rank of
    tensor parallelism or Ulysses has a contiguous range of whole blocks. In differential attention
    a block can have two key heads, one per map, and two value heads, the halves of a wide value.

    Attributes:
        head_dim: number of channels of a query, key or value head.
        rows: the heads of a block in the order of its rows, as pairs of a kind and a number of
            consecutive heads. Example: (("q", 4), ("k", 1), ("v", 1)) has four queries per key.
        outputs: output channels of the attention per block, divided by ``head_dim``.
    """

    head_dim: int
    blocks: int
    rows: Rows
    outputs: int

    def channels(self, kind: str) -> int:
        """Return the number of rows of ``linear_qkv`` that belong to a kind ("q", "k" or "v")."""
        return self._count(kind) * self.head_dim

    def _count(self, kind: str) -> int:
        return self.blocks * sum(count for each, count in self.rows if each == kind)

    @property
    def queries(self) -> int:
        """Number of query heads of the layer."""
        return self._count("q")

    @property
    def keys(self) -> int:
        """Number of key heads of the layer, which equals the number of value heads."""
        return self._count("k")

    @property
    def query_channels(self) -> int:
        """Number of channels of all queries of a token."""
        return self.queries * self.head_dim

    @property
    def key_channels(self) -> int:
        """Number of channels of all keys of a token, which equals the number for its values."""
        return self.keys * self.head_dim

    @property
    def qkv_channels(self) -> int:
        """Number of rows of ``linear_qkv``."""
        return self.query_channels + 2 * self.key_channels

    @property
    def output_channels(self) -> int:
        """Number of channels of the attention's output, the input of ``linear_proj``."""
        return self.blocks * self.outputs * self.head_dim

    @property
    def group(self) -> Rows:
        """Shortest sequence of pairs that, repeated one or more times, equals ``rows``.

        Example: the group of q, k, v, q, k, v is q, k, v if both halves have equal numbers.
        """
        lengths = (n for n in range(1, len(self.rows)) if len(self.rows) % n == 0)
        repeated = (n for n in lengths if self.rows == self.rows[:n] * (len(self.rows) // n))
        return self.rows[: next(repeated, len(self.rows))]

    def query_slices(self, keys: int) -> Iterator[slice]:
        """Yield the slice of query heads that attend to each of the first ``keys`` key heads.

        Both are counted within any range of whole blocks, such as the heads of one rank. Within a
        block, queries attend to the next key in ``rows``.
        """
        counts = [count for kind, count in self.rows if kind == "q"]
        first = 0
        for key in range(keys):
            count = counts[key % len(counts)]
            yield slice(first, first + count)
            first += count
