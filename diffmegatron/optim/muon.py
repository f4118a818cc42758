"""Muon (Jordan et al., 2024) for the matrices of the layers, under any partition of ZeRO.

    M <- momentum M + (1 - momentum) G
    W <- (1 - lr decay) W - lr scale NewtonSchulz((1 - momentum) G + momentum M)

G is the clipped gradient, and scale depends on the shape of the matrix. Without
``optimizer.muon.nesterov`` the argument of NewtonSchulz is the new M. As in ``torch.optim.Muon``,
M is an average, so it is saved like Adam's first moment. M has the partition of the master weights.
Each matrix has an owner among the ranks of its pipeline stage (tensor x data x context parallel),
which orthogonalizes it. All ranks send the owner their elements in the run's precision, and it
returns the result. Newton-Schulz begins with the same rounding in ``torch.optim.Muon``. A round
handles at most one matrix of each owner. docs/design/muon.md compares this with other divisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, distributed

from diffmegatron.config.muon_matrices import FusedMatrix, deal, fused_matrices
from diffmegatron.config.optimizer_config import MuonConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import NamedTensor, layer_number, network_tensors
from diffmegatron.model.build import DTYPES
from diffmegatron.model.parameter_shards import ParameterShards, Shard
from diffmegatron.optim.newton_schulz import orthogonalize
from diffmegatron.optim.partition import ElementRange, Partition
from diffmegatron.parallel.parallel_state import ParallelState


@dataclass(frozen=True)
class _Piece:
    """Elements [start, start + length) of a flattened tensor-parallel shard of a matrix."""

    tensor_rank: int
    start: int
    length: int


@dataclass(frozen=True)
class ShardedMatrix:
    """A matrix, and where its elements are.

    Attributes:
        matrix: shape of the unsharded matrix.
        shape: shape of the shard of one tensor-parallel rank.
        axis: axis along which tensor-parallel ranks shard the matrix.
        pieces: elements that each rank of the pipeline stage holds; the pieces of a tensor-parallel
            rank are in their order.
        own: elements that this rank holds, as ranges of its flat master tensor.
    """

    matrix: FusedMatrix
    shape: tuple[int, int]
    axis: int
    pieces: Sequence[_Piece]
    own: Sequence[slice]

    @cached_property
    def lengths(self) -> list[int]:
        """Number of elements that each rank of the pipeline stage holds."""
        return [piece.length for piece in self.pieces]

    def assemble(self, received: Tensor) -> Tensor:
        """Return the stacked matrices, [count, rows, columns], from the elements of all ranks."""
        shards: dict[int, list[Tensor]] = {}
        for piece, values in zip(self.pieces, received.split(self.lengths), strict=True):
            if piece.length:
                shards.setdefault(piece.tensor_rank, []).append(values)
        whole = [torch.cat(values).view(self.shape) for values in shards.values()]
        joined = torch.cat(whole, dim=self.axis)
        return joined.view(self.matrix.count, self.matrix.rows, self.matrix.columns)

    def divide(self, matrices: Tensor) -> Tensor:
        """Return the elements in the order of the argument of :meth:`assemble`, 1-dim."""
        ranks = dict.fromkeys(piece.tensor_rank for piece in self.pieces if piece.length)
        shards = matrices.reshape(-1, self.matrix.columns).chunk(len(ranks), dim=self.axis)
        flat = dict(zip(ranks, (shard.flatten() for shard in shards), strict=True))
        return torch.cat(
            [
                flat[piece.tensor_rank][piece.start : piece.start + piece.length]
                for piece in self.pieces
                if piece.length
            ]
        )


class FlatMuon:
    """Muon's update of the matrices in one flat master tensor; all ranks of a stage have the same.

    ``dtype`` is that of the Newton-Schulz iterations, which run on ``parallel_state.device``.
    """

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        settings: MuonConfig,
        dtype: torch.dtype,
        parallel_state: ParallelState,
    ) -> None:
        self._settings, self._dtype, self._device = settings, dtype, parallel_state.device
        self._group = parallel_state.stage_group
        self._rank, self._ranks = self._group.rank(), self._group.size()
        self._rounds = deal(
            matrices, self._ranks, lambda each: each.matrix.operations(settings.steps)
        )

    @torch.no_grad()
    def update(self, flat: Tensor, momentum: Tensor, lr: float, weight_decay: float) -> None:
        """Update ``momentum`` and the weights ``flat`` (float32 [n]) by ``flat.grad``.

        The gradient is overwritten. All ranks of the pipeline stage must call this method.
        """
        gradient, weights, beta = flat.grad, flat.data, self._settings.momentum
        assert gradient is not None
        momentum.lerp_(gradient, 1 - beta)
        update = gradient.lerp_(momentum, beta) if self._settings.nesterov else momentum
        weights.mul_(1 - lr * weight_decay)
        for matrices in self._rounds:
            # No local variable may keep a tensor of the round alive in the next one.
            self._apply(weights, matrices, self._orthogonalize(matrices, update), lr)

    def _elements(self, matrices: Sequence[ShardedMatrix], update: Tensor) -> Tensor:
        """Return this rank's elements (1-dim) of the matrices of a round."""
        held = [update[where] for matrix in matrices for where in matrix.own]
        return (torch.cat(held) if held else update[:0]).to(self._device, self._dtype)

    def _orthogonalize(self, matrices: Sequence[ShardedMatrix], update: Tensor) -> Tensor:
        """Return this rank's elements (1-dim) of the orthogonalized matrices of a round."""
        to_owners = [matrix.lengths[self._rank] for matrix in matrices]
        to_owners += [0] * (self._ranks - len(matrices))
        own = matrices[self._rank] if self._rank < len(matrices) else None
        from_all = [0] * self._ranks if own is None else own.lengths
        received = self._exchange(self._elements(matrices, update), to_owners, from_all)
        if own is not None:
            received = own.divide(orthogonalize(own.assemble(received), self._settings.steps))
        return self._exchange(received, from_all, to_owners)

    def _apply(
        self, weights: Tensor, matrices: Sequence[ShardedMatrix], elements: Tensor, lr: float
    ) -> None:
        """Subtract this rank's elements (1-dim) of orthogonalized matrices from its weights."""
        lengths = [matrix.lengths[self._rank] for matrix in matrices]
        parts = elements.to(weights.device, weights.dtype).split(lengths)
        for matrix, part in zip(matrices, parts, strict=True):
            if matrix.own:
                views = [weights[where] for where in matrix.own]
                values = part.split([view.numel() for view in views])
                torch._foreach_add_(views, values, alpha=-lr * self._scale(matrix.matrix))

    def _exchange(self, sent: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Send ``sends[i]`` elements to each rank i, and return those that this rank receives."""
        if self._ranks == 1:
            return sent
        received = sent.new_empty(sum(receives))
        distributed.all_to_all_single(received, sent, receives, sends, group=self._group)
        return received

    def _scale(self, matrix: FusedMatrix) -> float:
        if self._settings.scale == "rms":
            return 0.2 * max(matrix.rows, matrix.columns) ** 0.5
        return max(1.0, matrix.rows / matrix.columns) ** 0.5


def muon_parameters(shards: ParameterShards, recipe: Recipe) -> dict[torch.nn.Parameter, Shard]:
    """Return the trained parameters that Muon updates, each with its first shard."""
    if recipe.optimizer.kind != "muon":
        return {}
    matrices = {tensor.name for tensor in network_tensors(recipe.model) if tensor.is_matrix}
    return {
        parameter: shard
        for parameter, (shard, *_) in shards.items()
        if parameter.requires_grad and shard.name in matrices
    }


def flat_muon(
    shards: ParameterShards, recipe: Recipe, partition: Partition, parallel_state: ParallelState
) -> dict[Tensor, FlatMuon]:
    """Return Muon's update of each flat master tensor that has matrices."""
    settings, dtype = recipe.optimizer.muon, DTYPES[recipe.training.precision]
    parameters = muon_parameters(shards, recipe)
    tensors = {tensor.name: tensor for tensor in network_tensors(recipe.model)}
    by_flat: dict[Tensor, list[ShardedMatrix]] = {}
    for parameter, flat, ranges in partition.ranges(parallel_state.data_context_group.size()):
        if parameter not in parameters:
            continue
        tensor = tensors[parameters[parameter].name]
        kind = recipe.model.attention.of_layer(layer_number(tensor.name))
        place = _Place(
            numel=sum(shard.numel for shard in shards[parameter]),
            axis=int(shards[parameter][0].shape[1] < tensor.shape[1]),
            tensor_parallel=parallel_state.tensor_size if tensor.sharded else 1,
            # In Megatron-core's order of the ranks of a stage, tensor parallelism is innermost.
            members=[(rank, each) for each in ranges for rank in range(parallel_state.tensor_size)],
            own=partition.range_of(parameter),
        )
        for matrix in fused_matrices(tensor, kind, per_head=settings.per_head):
            by_flat.setdefault(flat, []).extend(
                place.of(matrix, ranks, parallel_state.tensor_rank)
                for ranks in _copies(tensor, parallel_state.tensor_size)
            )
    return {
        flat: FlatMuon(matrices, settings, dtype, parallel_state)
        for flat, matrices in by_flat.items()
    }


def _copies(tensor: NamedTensor, tensor_parallel: int) -> list[range]:
    """Return, for each copy of a tensor, the tensor-parallel ranks that together store it."""
    ranks = range(tensor_parallel)
    return [ranks] if tensor.sharded else [range(rank, rank + 1) for rank in ranks]


@dataclass(frozen=True)
class _Place:
    """A parameter's elements on the ranks of the pipeline stage.

    Attributes:
        numel: number of elements of the parameter on a tensor-parallel rank.
        axis: axis along which tensor-parallel ranks shard it.
        tensor_parallel: number of these shards.
        members: (tensor-parallel rank, elements of the flattened parameter) of each rank.
        own: elements on this rank.
    """

    numel: int
    axis: int
    tensor_parallel: int
    members: Sequence[tuple[int, slice]]
    own: ElementRange | None

    def of(self, matrix: FusedMatrix, ranks: range, own_rank: int) -> ShardedMatrix:
        """Return where the elements of a matrix are that tensor-parallel ``ranks`` store."""
        ranges = matrix.ranges(self.numel, self.tensor_parallel)
        pieces = []
        for rank, elements in self.members:
            start, stop = (_position(ranges, edge) for edge in (elements.start, elements.stop))
            pieces.append(_Piece(rank, start, stop - start if rank in ranks else 0))
        own = [] if self.own is None or own_rank not in ranks else _in_flat(ranges, self.own)
        rows, columns = matrix.count * matrix.rows, matrix.columns
        if self.axis == 0:
            shape = (rows // self.tensor_parallel, columns)
        else:
            shape = (rows, columns // self.tensor_parallel)
        return ShardedMatrix(matrix, shape, self.axis, pieces, own)


def _position(ranges: Sequence[slice], element: int) -> int:
    """Return how many elements of ``ranges``, which rise, are before ``element``."""
    return sum(max(0, min(each.stop, element) - each.start) for each in ranges)


def _in_flat(ranges: Sequence[slice], held: ElementRange) -> list[slice]:
    """Return the elements of ``ranges`` that a rank holds, as ranges of its flat tensor."""
    shift = held.where.start - held.start
    inside = (
        (max(each.start, held.elements.start), min(each.stop, held.elements.stop))
        for each in ranges
    )
    return [slice(start + shift, stop + shift) for start, stop in inside if start < stop]
