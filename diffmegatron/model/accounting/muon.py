"""Counts of Muon's matrices, and of the memory, traffic and operations of its update."""

from collections.abc import Iterator, Sequence

from diffmegatron.config.muon_matrices import FusedMatrix, deal, fused_matrices
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import NamedTensor, layer_number, stage_tensors
from diffmegatron.config.trainable_patterns import trained_parts
from diffmegatron.model.accounting.activations import BYTES


def _trained_by_muon(recipe: Recipe, stage: int) -> Iterator[NamedTensor]:
    if recipe.optimizer.kind == "muon":
        for tensor in stage_tensors(recipe, stage):
            if tensor.is_matrix and trained_parts(tensor, recipe):
                yield tensor


def muon_elements(recipe: Recipe, stage: int) -> int:
    """Return a rank's number of parameters that Muon trains, before ZeRO partitions them."""
    tensor = recipe.parallel.tensor
    return sum(each.elements(tensor) for each in _trained_by_muon(recipe, stage))


def muon_rounds(recipe: Recipe, world_size: int, stage: int) -> list[Sequence[FusedMatrix]]:
    """Return the rounds of :class:`diffmegatron.optim.muon.FlatMuon` on a pipeline stage.

    A tensor that every tensor-parallel rank has is orthogonalized once for each of them.
    """
    settings = recipe.optimizer.muon
    matrices = [
        matrix
        for tensor in _trained_by_muon(recipe, stage)
        for matrix in fused_matrices(
            tensor,
            recipe.model.attention.of_layer(layer_number(tensor.name)),
            per_head=settings.per_head,
        )
        for _ in range(1 if tensor.sharded else recipe.parallel.tensor)
    ]
    ranks = stage_ranks(recipe, world_size)
    return deal(matrices, ranks, lambda matrix: matrix.operations(settings.steps))


def stage_ranks(recipe: Recipe, world_size: int) -> int:
    """Return the number of ranks of a pipeline stage, among which matrices are dealt."""
    return world_size // recipe.parallel.pipeline


def update_bytes(recipe: Recipe, world_size: int, stage: int) -> int:
    """Return the temporary memory of Muon's update on the rank that needs most.

    In the Newton-Schulz iterations, an owner has the received elements, the matrix, and the present
    and the next iterate. It also has two square matrices, and the elements that it has sent.
    """
    ranks = stage_ranks(recipe, world_size)
    most = 0
    for matrices in muon_rounds(recipe, world_size, stage):
        held = sum(map(elements, matrices)) // ranks if ranks > 1 else 0
        largest = max(
            4 * elements(each) + 2 * each.count * min(each.rows, each.columns) ** 2
            for each in matrices
        )
        most = max(most, held + largest)
    return BYTES[recipe.training.precision] * most


def sent_bytes(recipe: Recipe, world_size: int, stage: int) -> float:
    """Return the bytes that the first owner of every round sends per step.

    This rank sends most. It sends its elements of the other owners' matrices, and the result for
    the elements that the other ranks hold of its own matrix.
    """
    ranks = stage_ranks(recipe, world_size)
    sent = 0.0
    for first, *others in muon_rounds(recipe, world_size, stage):
        sent += sum(map(elements, others)) / ranks + elements(first) * (ranks - 1) / ranks
    return BYTES[recipe.training.precision] * sent


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
