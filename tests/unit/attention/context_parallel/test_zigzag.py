"""The shards of a sequence on context-parallel ranks equal those of Megatron-core."""

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils

from diffmegatron.attention.context_parallel.chunk_numbers import (
    chunks_before,
    rank_chunks,
    seen_chunks,
)
from diffmegatron.attention.context_parallel.whole_sequence import row_boundaries
from diffmegatron.attention.context_parallel.zigzag import (
    shard_sequence,
    to_rank_order,
    to_sequence_order,
)
from diffmegatron.parallel.cpu import _TorchOnCpu, without_cuda


class Group:
    """A process group with the two methods that Megatron-core calls."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sequence_shards_equal_those_of_megatrons_rotary_embedding(size, monkeypatch):
    # Megatron-core's function pins memory, which needs CUDA.
    monkeypatch.setattr(rope_utils, "torch", _TorchOnCpu())
    positions = torch.arange(48).view(48, 1, 1, 1)
    for rank in range(size):
        with without_cuda():
            expected = rope_utils.get_pos_emb_on_this_cp_rank(positions, 0, Group(rank, size))
        assert torch.equal(shard_sequence(positions, 0, rank, size), expected)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_rank_has_the_same_number_of_causal_pairs(size):
    pairs = [sum(number + 1 for number in rank_chunks(rank, size)) for rank in range(size)]
    assert set(pairs) == {2 * size + 1}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 6, 9, 100])
def test_seen_chunks_are_those_with_a_visible_key(size, window):
    length, tokens = 4, 8 * size
    before = chunks_before(window, length, size)
    for source in range(size):
        for target in range(size):
            expected = tuple(
                index
                for index, number in enumerate(rank_chunks(source, size))
                if any(
                    0 <= query - key < (window or tokens)
                    for key in range(number * length, (number + 1) * length)
                    for query in shard_sequence(torch.arange(tokens), 0, target, size).tolist()
                )
            )
            assert seen_chunks(source, target, size, before) == expected


@pytest.mark.parametrize("size", [1, 2, 3])
def test_orders_are_each_others_inverse(size):
    whole = torch.arange(12 * size).view(-1, 2)
    by_rank = torch.cat([shard_sequence(whole, 0, rank, size) for rank in range(size)])
    assert torch.equal(to_sequence_order(by_rank, size), whole)
    assert torch.equal(to_rank_order(whole, size), by_rank)


def test_document_boundaries_start_at_zero_in_each_row():
    documents = torch.tensor([0, 3, 8, 10, 16], dtype=torch.int32)
    first, second = row_boundaries(documents, rows=2)
    assert first.tolist() == [0, 3, 8]
    assert second.tolist() == [0, 2, 8]
