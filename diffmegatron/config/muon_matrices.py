"""The matrices that Muon orthogonalizes, and the rank that orthogonalizes each of them.

A tensor may fuse several matrices, such as the queries, keys and values of ``linear_qkv``. Muon's
update of a fused tensor must be that of its separate matrices. This module needs no torch, so
``plan`` counts with the same matrices and owners.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.attention.kinds.layer import FusedHead
from diffmegatron.config.tensors import NamedTensor

T = TypeVar("T")


@dataclass(frozen=True)
class FusedMatrix:
    """A matrix that is part of a tensor, or several equal ones that are stacked along the rows.

    The rows of the tensor are equal blocks, and a block has equal parts. The matrix has some parts
    of every block.

    Attributes:
        blocks: number of blocks of the unsharded tensor, of which a tensor-parallel rank has equal
            shares; None if the shard of each rank is one block.
        parts: indices of the matrix's parts in a block, rising.
        parts_of_block: number of parts of a block.
        count: number of stacked matrices, each with consecutive rows.
        rows, columns: shape of one unsharded matrix.
    """

    blocks: int | None
    parts: tuple[int, ...]
    parts_of_block: int
    count: int
    rows: int
    columns: int

    def ranges(self, numel: int, tensor_parallel: int) -> list[slice]:
        """Return the elements of the matrix in a rank's flattened shard of ``numel`` elements.

        Neighbouring ranges are joined. Their order is that of the rows.
        """
        blocks = 1 if self.blocks is None else self.blocks // tensor_parallel
        size = numel // (blocks * self.parts_of_block)
        found: list[slice] = []
        for block in range(blocks):
            for part in self.parts:
                start = (block * self.parts_of_block + part) * size
                if found and found[-1].stop == start:
                    start = found.pop().start
                found.append(slice(start, (block * self.parts_of_block + part + 1) * size))
        return found

    def operations(self, steps: int) -> int:
        """Return the multiply-adds of ``steps`` Newton-Schulz iterations (optim/newton_schulz)."""
        short, long = sorted((self.rows, self.columns))
        return self.count * steps * (2 * short * short * long + short**3)


def fused_matrices(
    tensor: NamedTensor, kind: AttentionKind, *, per_head: bool
) -> Iterator[FusedMatrix]:
    """Yield the matrices of a tensor of a layer with this attention; ``is_matrix`` must be true.

    With ``per_head``, the heads of ``linear_qkv`` are separate matrices.
    """
    blocks: int | None = None
    heads: tuple[FusedHead, ...] = (FusedHead("whole", 0),)
    if tensor.name.endswith("linear_qkv.weight"):
        blocks, heads = kind.heads.blocks, kind.matrices
    elif tensor.name.endswith("linear_fc1.weight"):
        heads = (FusedHead("gate", 0), FusedHead("up", 0))
    for name in dict.fromkeys(head.matrix for head in heads):
        parts = tuple(index for index, head in enumerate(heads) if head.matrix == name)
        count = 1
        if per_head and blocks is not None:
            count = blocks * len({heads[index].head for index in parts})
        rows, columns = tensor.shape
        rows = rows * len(parts) // len(heads) // count
        yield FusedMatrix(blocks, parts, len(heads), count, rows, columns)


def deal(matrices: Sequence[T], ranks: int, cost: Callable[[T], int]) -> list[Sequence[T]]:
    """Divide matrices into rounds, in which rank i orthogonalizes the matrix i of the round.

    A round has at most as many matrices as there are ranks. Its matrices have similar costs, so
    that no rank waits long for another.
    """
    ordered = sorted(matrices, key=cost, reverse=True)
    return [ordered[first : first + ranks] for first in range(0, len(ordered), ranks)]
