"""Ring attention on one rank, which has both chunks of the sequence, with windows."""

import pytest
import torch

from diffmegatron.attention.context_parallel import ring
from diffmegatron.attention.kernels.api import diff_attention
from tests.kernels.loops import make_inputs, relative_error, value_and_grads


class OneRank:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def by_ring(window, cu_seqlens=None):
    def attend(*heads):
        *maps, lambda_ = heads
        options = {"lambda_": lambda_, "cu_seqlens": cu_seqlens, "window": window}
        return ring.ring_attention(OneRank(), "blocked", *maps, **options)

    return attend


@pytest.mark.parametrize("window", [1, 3, 6, 7, 11])
@pytest.mark.parametrize("documents", [None, torch.tensor([0, 4, 12])])
def test_windows_within_and_across_chunks_equal_the_equation(window, documents):
    inputs = make_inputs(rows=12, heads=2)
    found = value_and_grads(by_ring(window, documents), inputs)
    options = {"window": window, "cu_seqlens": documents, "backend": "reference"}
    expected = value_and_grads(lambda *x: diff_attention(*x, **options), inputs)
    assert relative_error(found[0], expected[0]) < 1e-13
    for grad, wanted in zip(found[1], expected[1], strict=True):
        assert relative_error(grad, wanted) < 1e-12


def test_a_window_of_the_sequence_changes_no_bit(monkeypatch):
    # With three ranks or more, the direct exchange would add gradients in another order.
    monkeypatch.setattr(ring, "_direct", None)
    inputs = make_inputs(rows=12, heads=2, dtype=torch.float32)
    (out, grads), (plain, plain_grads) = (
        value_and_grads(by_ring(window), inputs) for window in (12, None)
    )
    assert torch.equal(out, plain)
    assert all(map(torch.equal, grads, plain_grads))
