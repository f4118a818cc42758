"""Counts of Muon's matrices, and of the memory, traffic and operations of its update."""

from collections.abc import Iterator, Sequence

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.config.muon_matrices import FusedMatrix, deal, fused_matrices
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import (
    NamedTensor,
    layer_number,
    layer_tensors,
    stage_kinds,
    stage_tensors,
)
from diffmegatron.config.trainable_patterns import trained_parts, trains_everything
from diffmegatron.model.accounting.activations import BYTES


def _trained_by_muon(
    recipe: Recipe, stage: int
) -> Iterator[tuple[NamedTensor, AttentionKind, int]]:
    """Yield Muon's tensors of a stage, each with its attention and a number of equal layers."""
    if recipe.optimizer.kind != "muon":
        return
    if trains_everything(recipe):
        for kind, layers in stage_kinds(recipe, stage):
            for tensor in layer_tensors(recipe.model, kind):
                if tensor.is_matrix:
                    yield tensor, kind, layers
        return
    for tensor in stage_tensors(recipe, stage):
        if tensor.is_matrix and trained_parts(tensor, recipe):
            yield tensor, recipe.model.attention.of_layer(layer_number(tensor.name)), 1


def muon_elements(recipe: Recipe, stage: int) -> int:
    """Return a rank's number of parameters that Muon trains, before ZeRO partitions them."""
    tensor_parallel = recipe.parallel.tensor
    return sum(
        layers * tensor.elements(tensor_parallel)
        for tensor, _, layers in _trained_by_muon(recipe, stage)
    )


def muon_rounds(recipe: Recipe, world_size: int, stage: int) -> list[Sequence[FusedMatrix]]:
    """Return the rounds of :class:`diffmegatron.optim.muon.FlatMuon` on a pipeline stage.

    All matrices are dealt together. FlatMuon deals those of each flat tensor, of which there are
    several with ``lr_multipliers``, so it then has more rounds.

    A tensor that every tensor-parallel rank has is orthogonalized once for each of them.
    """
    settings = recipe.optimizer.muon
    matrices: list[FusedMatrix] = []
    for tensor, kind, layers in _trained_by_muon(recipe, stage):
        copies = layers * (1 if tensor.sharded else recipe.parallel.tensor)
        for matrix in fused_matrices(tensor, kind, per_head=settings.per_head):
            matrices += [matrix] * copies
    ranks = stage_ranks(recipe, world_size)
    return deal(matrices, ranks, lambda matrix: matrix.operations(settings.steps))


def stage_ranks(recipe: Recipe, world_size: int) -> int:
    """Return the number of ranks of a pipeline stage, among which matrices are dealt."""
    return world_size // recipe.parallel.pipeline


def update_bytes(recipe: Recipe, world_size: int, stage: int) -> int:
    """Return the temporary memory of Muon's update on the rank that needs most.

    In the Newton-Schulz iterations, an owner has the received elements, the matrix, and the present
    and the next iterate. It also has two square matrices.
    """
    most = max(
        (
            4 * elements(each) + 2 * each.count * min(each.rows, each.columns) ** 2
            for matrices in muon_rounds(recipe, world_size, stage)
            for each in matrices
        ),
        default=0,
    )
    return BYTES[recipe.training.precision] * most


def sent_bytes(recipe: Recipe, world_size: int, stage: int) -> float:
    """Return the bytes that the first owner of every round sends per step.

    This rank sends most: in each round its elements of all matrices, and the result of its own
    matrix. Of both, a part of 1 / ranks stays on the rank, as in other collectives.
    """
    ranks = stage_ranks(recipe, world_size)
    payload = sum(
        sum(map(elements, matrices)) / ranks + elements(matrices[0])
        for matrices in muon_rounds(recipe, world_size, stage)
    )
    return BYTES[recipe.training.precision] * payload * (ranks - 1) / ranks


def elements(matrix: FusedMatrix) -> int:
    """Return the number of elements of a matrix, or of all that are stacked."""
    return matrix.count * matrix.rows * matrix.columns


def operations_in_sequence(recipe: Recipe, world_size: int, stage: int) -> int:
    """Return the multiply-adds of a step's Newton-Schulz iterations on the slowest rank.

    In every round, all ranks wait for the owner of the most expensive matrix.
    """
    steps = recipe.optimizer.muon.steps
    return sum(
        max(matrix.operations(steps) for matrix in matrices)
        for matrices in muon_rounds(recipe, world_size, stage)
    )
