"""Positions of stored pieces in their tensor, and the check that they cover the tensor."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from pydantic import ConfigDict, Field

from diffmegatron.checkpoint.checkpoint_manifest import CountOrZero
from diffmegatron.errors import UserError
from diffmegatron.files import shorten

_Axes = Annotated[tuple[CountOrZero, ...], Field(max_length=8)]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a rectangular region of a tensor, one number per axis each."""


@dataclass(frozen=True)
class Place:
    """Position of a piece: elements [start, start + numel) of a flattened box of a named tensor.

    Attributes:
        global_shape: shape of the unsharded tensor.
        offset: first index of the box in the unsharded tensor, per axis.
        shape: shape of the box.
        start: index in the flattened box (row-major order).
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=1000)]
    global_shape: _Axes
    offset: _Axes
    shape: _Axes
    start: CountOrZero
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
        """Offset and shape of the box."""
        return self.offset, self.shape


def check_tiling(places: Iterable[Place], owner: str) -> None:
    """Check that the pieces of one tensor cover every element exactly once.

    Every parallel layout cuts a tensor along the lines of a grid. The boxes must therefore be the
    cells of a grid, which cannot overlap.

    Args:
        places: positions of all pieces of the tensor; at least one.
        owner: name of the checkpoint in error messages.
    """
    boxes: dict[Box, list[Place]] = {}
    for place in places:
        boxes.setdefault(place.box, []).append(place)
    name, shape = place.name, place.global_shape
    places = [place for box in boxes.values() for place in box]
    if any(place.global_shape != shape for place in places):
        raise UserError(f"{owner} stores {shorten(name)} with more than one shape")
    held, whole = sum(place.numel for place in places), math.prod(shape)
    if held != whole:
        raise UserError(
            f"{owner} holds {held} of the {whole} elements of {shorten(name)}; a rank's file is "
            "missing or belongs to another save"
        )
    if not _is_grid(list(boxes), shape) or not all(_is_gapless(box) for box in boxes.values()):
        raise UserError(
            f"{owner} holds pieces of {shorten(name)} that overlap or that no parallel layout cuts"
        )


def _is_grid(boxes: list[Box], shape: tuple[int, ...]) -> bool:
    """Return whether every box extends from one edge of the grid to the next, on every axis.

    The edges of an axis are the offsets of all boxes, and the size of the tensor.
    """
    for axis, size in enumerate(shape):
        edges = sorted({offset[axis] for offset, _ in boxes} | {size})
        following = dict(pairwise(edges))
        if any(offset[axis] + part[axis] != following.get(offset[axis]) for offset, part in boxes):
            return False
    return True


def _is_gapless(places: list[Place]) -> bool:
    end = 0
    for place in sorted(places, key=lambda each: each.start):
        if place.start != end:
            return False
        end += place.numel
    return end == math.prod(places[0].shape)
