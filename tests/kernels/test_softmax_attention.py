"""Tests that plain softmax attention equals the loops of differential attention with lambda 0."""

import pytest
import torch

from diffmegatron.attention.kernels.api import softmax_attention
from tests.kernels.loops import loop_diff_attention, make_inputs, relative_error


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"rows": 13}, {}),
        ({"rows": 5, "keys": 12}, {}),
        ({"rows": 1, "keys": 12}, {}),
        ({"rows": 9, "keys": 4}, {}),
        ({"rows": 9}, {"query_offset": 2, "key_offset": 5}),
        ({"rows": 9}, {"cu_seqlens": torch.tensor([0, 2, 5, 9])}),
        ({"rows": 5, "keys": 12}, {"window": 4}),
    ],
    ids=["square", "s < t", "decoding", "s > t", "offsets", "documents", "window"],
)
@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
def test_equals_loops(backend, causal, shape, options):
    if "window" in options and not causal:
        pytest.skip("a window needs a causal mask")
    q, k, _, _, v, _ = make_inputs(batch=2, heads=4, kv_heads=2, **shape)
    v = v[..., : q.shape[-1]].detach().requires_grad_()
    out = softmax_attention(q, k, v, causal=causal, backend=backend, **options)
    if "cu_seqlens" in options:
        options = {"bounds": tuple(options["cu_seqlens"].tolist())}
    expected = loop_diff_attention(q, k, q, k, v, torch.tensor(0.0), causal=causal, **options)
    assert relative_error(out, expected) < 1e-12
    grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for actual, grad in zip(grads, wanted, strict=True):
        assert relative_error(actual, grad) < 1e-11


def test_blocked_keeps_sixteen_bits_but_computes_in_fp32():
    q, k, _, _, v, _ = make_inputs(rows=9, dtype=torch.bfloat16)
    v = v[..., :4]
    out = softmax_attention(q, k, v, backend="blocked")
    exact = softmax_attention(*(x.float() for x in (q, k, v)), backend="blocked")
    assert torch.equal(out, exact.bfloat16())


def test_softmax_scale():
    q, k, _, _, v, _ = make_inputs(heads=2, kv_heads=2)
    v = v[..., : q.shape[-1]]
    out = softmax_attention(q, k, v, softmax_scale=0.3)
    expected = loop_diff_attention(q, k, q, k, v, torch.tensor(0.0), scale=0.3)
    assert relative_error(out, expected) < 1e-12
