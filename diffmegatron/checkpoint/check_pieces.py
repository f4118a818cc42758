"""Where the pieces of a checkpoint lie, and whether together they are whole tensors."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import ConfigDict, Field

from diffmegatron.errors import UserError
from diffmegatron.files import clipped

_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Axes = Annotated[tuple[_Count, ...], Field(max_length=8)]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""


@dataclass(frozen=True)
class Place:
    """Where a piece lies: a range of the elements of a box of a named tensor.

    Attributes:
        name: of the whole tensor.
        global_shape: of the whole tensor.
        offset: where the box begins in the whole tensor, per axis.
        shape: of the box.
        start: first element of the range in the flattened box.
        numel: elements of the range.

    Raises:
        ValueError: the range is not in the box, or the box not in the tensor.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    global_shape: _Axes
    offset: _Axes
    shape: _Axes
    start: _Count
    numel: Annotated[int, Field(ge=1, lt=2**63)]

    def __post_init__(self) -> None:
        if not len(self.global_shape) == len(self.offset) == len(self.shape):
            raise ValueError("global_shape, offset and shape have different lengths")
        axes = zip(self.offset, self.shape, self.global_shape, strict=True)
        if any(offset + size > whole for offset, size, whole in axes):
            raise ValueError("the box is not within the tensor")
        if self.start + self.numel > math.prod(self.shape):
            raise ValueError("the range is not within the box")

    @property
    def box(self) -> Box:
        """The box that the range is of."""
        return self.offset, self.shape


def check_tiling(places: Iterable[Place], owner: str) -> None:
    """Refuse places of one tensor that overlap, or that leave elements out.

    The boxes must be the cells of a grid, uneven if need be, as those of every layout are: then to
    compare each box with the grid's edges is enough, where n boxes have n^2 pairs.

    Args:
        places: of one name, not none.
        owner: what holds them, for the sentence.

    Raises:
        UserError: they are not, with the tensor's name.
    """
    boxes: dict[Box, list[Place]] = {}
    for place in places:
        boxes.setdefault(place.box, []).append(place)
    name, shape = place.name, place.global_shape
    places = [place for box in boxes.values() for place in box]
    if any(place.global_shape != shape for place in places):
        raise UserError(f"{owner} gives {clipped(name)} more than one shape")
    held, whole = sum(place.numel for place in places), math.prod(shape)
    if held != whole:
        raise UserError(
            f"{owner} holds {held} of the {whole} elements of {clipped(name)}; a rank's file is "
            "missing or of another save"
        )
    if not _is_grid(list(boxes), shape) or not all(_is_gapless(box) for box in boxes.values()):
        raise UserError(f"{owner} holds pieces of {clipped(name)} that overlap")


def _is_grid(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Whether every box reaches from one edge to the next, on every axis."""
    for axis, size in enumerate(shape):
        edges = sorted({offset[axis] for offset, _ in boxes} | {size})
        following = dict(pairwise(edges))
        if any(offset[axis] + part[axis] != following.get(offset[axis]) for offset, part in boxes):
            return False
    return True


def _is_gapless(places: list[Place]) -> bool:
    """Whether the ranges of one box follow each other from its first element to its last."""
    end = 0
    for place in sorted(places, key=lambda each: each.start):
        if place.start != end:
            return False
        end += place.numel
    return end == math.prod(places[0].shape)
