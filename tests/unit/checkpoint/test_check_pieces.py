"""Pieces of a checkpoint that do not cover each tensor exactly once are refused.

A piece is a range of elements in a box (a rectangular region) of a tensor.
"""

import time
from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffmegatron.checkpoint.sharded import Place, check_tiling
from diffmegatron.errors import UserError


def place(shape: tuple, offset: tuple, part: tuple, start: int, numel: int) -> Place:
    return Place("tensor", shape, offset, part, start, numel)


@st.composite
def grids(draw: st.DrawFn) -> list[Place]:
    """Draw the pieces of a tensor of up to three axes, in random order.

    The tensor is cut into a grid of boxes, and each box into ranges.
    """
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=3)))
    edges = [[0, *sorted(draw(st.sets(st.integers(1, n - 1))) if n > 1 else []), n] for n in shape]
    places = []
    for cell in product(*(pairwise(axis) for axis in edges)):
        offset = tuple(first for first, _ in cell)
        part = tuple(last - first for first, last in cell)
        numel = 1
        for size in part:
            numel *= size
        cuts = sorted(draw(st.sets(st.integers(1, numel - 1), max_size=3))) if numel > 1 else []
        for first, last in pairwise([0, *cuts, numel]):
            places.append(place(shape, offset, part, first, last - first))
    return draw(st.permutations(places))


def elements(each: Place) -> list[tuple[int, ...]]:
    """Return the indices of a place's elements in the whole tensor."""
    box = list(product(*(range(o, o + n) for o, n in zip(each.offset, each.shape, strict=True))))
    return box[each.start : each.start + each.numel]


@given(grids())
def test_pieces_cut_by_a_layout_are_accepted(places):
    check_tiling(places, "the checkpoint")


@given(st.data())
def test_accepted_pieces_cover_every_element_once(data):
    """Check that pieces which are accepted after one piece changed cover each element once."""
    places = data.draw(grids())
    index = data.draw(st.integers(0, len(places) - 1))
    values = {
        name: data.draw(st.lists(st.integers(0, 5), min_size=len(old), max_size=len(old)))
        if isinstance(old := getattr(places[index], name), tuple)
        else data.draw(st.integers(0, 9))
        for name in [data.draw(st.sampled_from(["offset", "shape", "start", "numel"]))]
    }
    old = places[index]
    changed = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    try:
        places[index] = Place(**{**vars(old), **changed})
        check_tiling(places, "the checkpoint")
    except ValueError:
        return
    counts = Counter(element for each in places for element in elements(each))
    assert counts == Counter(product(*map(range, old.global_shape)))


def test_hundred_thousand_boxes_take_seconds():
    side = 320
    places = [
        place((side, side), (row, column), (1, 1), 0, 1)
        for row in range(side)
        for column in range(side)
    ]
    started = time.process_time()
    check_tiling(places, "the checkpoint")
    places[-1] = places[0]
    with pytest.raises(UserError, match="holds pieces of tensor that overlap"):
        check_tiling(places, "the checkpoint")
    assert time.process_time() - started < 10


def test_boxes_outside_a_grid_are_refused():
    """Check that the five boxes of a pinwheel are refused.

    They cover every element once, but no parallel layout cuts a tensor into a pinwheel.
    """
    around = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    boxes = [*around, ((1, 1), (1, 1))]
    places = [place((3, 3), offset, part, 0, part[0] * part[1]) for offset, part in boxes]
    with pytest.raises(UserError, match="that no parallel layout cuts"):
        check_tiling(places, "the checkpoint")
