"""The visible pairs of a mask in all the forms that backends read, and their tables."""

import random

import pytest
import torch

from diffmegatron.attention.kernels.masks import build_mask
from tests.kernels.loops import visible_keys

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(60))
def test_all_forms_of_a_mask_have_the_same_pairs(seed):
    draw = random.Random(seed)
    rows, keys = draw.randint(1, 12), draw.randint(1, 12)
    query_offset, key_offset = draw.randint(0, 12), draw.randint(0, 12)
    causal = draw.random() < 0.8
    window = draw.randint(1, 14) if causal and draw.random() < 0.8 else None
    bounds = None
    if draw.random() < 0.5:
        bounds = torch.tensor([0, *sorted(draw.sample(range(1, 40), 5)), 40])
    mask = build_mask(
        rows,
        keys,
        causal=causal,
        cu_seqlens=bounds,
        query_offset=query_offset,
        key_offset=key_offset,
        window=window,
    )
    ends = [] if bounds is None else bounds.tolist()
    seen = torch.zeros(rows, keys, dtype=torch.bool)
    for row in range(rows):
        seen[row, visible_keys(row, keys, causal, query_offset, key_offset, ends, window)] = True
    hidden = mask.hidden((0, rows), (0, keys), CPU)
    assert torch.equal(torch.zeros_like(seen) if hidden is None else hidden, ~seen)
    for pairs, (start, stop) in (
        (seen, mask.key_intervals(CPU)),
        (seen.T, mask.query_intervals(CPU)),
    ):
        index = torch.arange(pairs.shape[1])
        assert torch.equal((index >= start[:, None]) & (index < stop[:, None]), pairs)
    first = draw.randrange(rows)
    last = draw.randint(first + 1, rows)
    start, stop = mask.key_range(first, last)
    block = seen[first:last]
    assert not block[:, :start].any() and not block[:, stop:].any()
    if block.any():
        prefix = mask.unmasked_prefix(first, last)
        assert block[:, start : start + prefix].all()


def test_the_layers_of_a_batch_share_one_table():
    """Check that equal masks share one table.

    If each layer had its own table, each table would be copied to the GPU, and the host would wait
    for the GPU at each copy.
    """
    bounds = torch.tensor([0, 2, 6])
    first, second = (build_mask(6, 6, cu_seqlens=bounds, window=3) for _ in range(2))
    assert first.key_intervals(CPU) is second.key_intervals(CPU)
    assert first.query_intervals(CPU) is second.query_intervals(CPU)
