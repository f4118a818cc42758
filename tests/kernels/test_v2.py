"""Tests of DIFF V2, plain attention and a subtraction per token and head, against float64 loops."""

from functools import partial

import pytest
import torch

from diffmegatron.attention.kernels.api import diff_attention_v2, softmax_attention, subtract_noise
from tests.kernels.loops import (
    loop_diff_attention_v2,
    make_v2_inputs,
    relative_error,
    value_and_grads,
)

SHAPES = {
    "pairs": {"rows": 9, "heads": 3},
    "pairs, two to a kv head": {"batch": 2, "rows": 7, "heads": 4, "kv_heads": 2},
    "3 signal heads to a noise head": {"rows": 6, "heads": 6, "ratio": 3, "kv_heads": 2},
    "one noise head": {"rows": 5, "heads": 4, "ratio": 4, "batch": 2},
    "decoding": {"rows": 1, "keys": 11, "heads": 4, "ratio": 2, "kv_heads": 2},
    "s > t": {"rows": 9, "keys": 4, "heads": 2},
}
PLACES = {
    "documents": {"cu_seqlens": torch.tensor([0, 1, 5, 9])},
    "chunk": {"query_offset": 2, "key_offset": 5},
    "document chunk": {"cu_seqlens": torch.tensor([0, 4, 30]), "query_offset": 7, "key_offset": 3},
}


def assert_equal_to_loops(inputs, tolerance, **options):
    loop_options = {name: x for name, x in options.items() if name != "backend"}
    if (bounds := loop_options.pop("cu_seqlens", None)) is not None:
        loop_options["bounds"] = tuple(bounds.tolist())
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    out, grads = value_and_grads(lambda *x: diff_attention_v2(*x, **options), inputs)
    expected, wanted = value_and_grads(
        lambda *x: loop_diff_attention_v2(*x, **loop_options), doubles
    )
    assert out.dtype == inputs[2].dtype
    assert relative_error(out, expected) < tolerance
    for name, x, grad, right in zip(("q", "k", "v", "lambda_"), inputs, grads, wanted, strict=True):
        assert grad.dtype == x.dtype
        assert relative_error(grad, right) < tolerance, name


@pytest.mark.parametrize("backend", ["auto", "reference", "blocked"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float64_equals_loops(shape, causal, backend):
    assert_equal_to_loops(make_v2_inputs(**shape), 1e-12, causal=causal, backend=backend)


@pytest.mark.parametrize("backend", ["auto", "blocked"])
@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_documents_and_offsets_equal_loops(options, backend):
    inputs = make_v2_inputs(rows=9, heads=4, ratio=2, kv_heads=2)
    assert_equal_to_loops(inputs, 1e-12, backend=backend, **options)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)],
    ids=["fp32", "bf16"],
)
def test_lower_precision_is_close_to_float64_of_the_same_inputs(dtype, tolerance):
    assert_equal_to_loops(
        make_v2_inputs(rows=12, heads=4, ratio=2, width=8, dtype=dtype), tolerance
    )


def halved(q, k, v, lambda_):
    """Return V2 with noise heads after all signal heads, so that some heads use wrong kv heads."""
    signal, noise = (q[:, :, part::2] for part in (0, 1))
    heads = softmax_attention(torch.cat([signal, noise], 2), k, v)
    first, second = heads.chunk(2, dim=2)
    return first - lambda_.unsqueeze(-1) * second


MUTATIONS = {
    "heads in halves, which meet other kv heads": halved,
    "halves taken for pairs": lambda q, k, v, lam: diff_attention_v2(
        torch.cat([q[:, :, ::2], q[:, :, 1::2]], 2), k, v, lam
    ),
    "noise head before its signal head": lambda q, k, v, lam: diff_attention_v2(
        q.unflatten(2, (-1, 2)).flip(3).flatten(2, 3), k, v, lam
    ),
    "sign of lambda": lambda q, k, v, lam: diff_attention_v2(q, k, v, -lam),
    "lambda of another head": lambda q, k, v, lam: diff_attention_v2(q, k, v, lam.roll(1, 2)),
    "lambda of another token": lambda q, k, v, lam: diff_attention_v2(q, k, v, lam.roll(1, 1)),
    "lambda of the layer": lambda q, k, v, lam: diff_attention_v2(
        q, k, v, lam.mean().expand_as(lam)
    ),
    "mask dropped": lambda *x: diff_attention_v2(*x, causal=False),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_mutations_differ_from_the_loops(mutation):
    inputs = make_v2_inputs(rows=8, heads=4, kv_heads=2)
    expected = loop_diff_attention_v2(*inputs)
    assert relative_error(diff_attention_v2(*inputs), expected) < 1e-13
    assert relative_error(mutation(*inputs), expected) > 0.05


def test_the_subtraction_saves_only_its_inputs():
    heads = torch.randn(2, 5, 8, 4, dtype=torch.bfloat16, requires_grad=True)
    lambda_ = torch.rand(2, 5, 6, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        subtract_noise(heads, lambda_)
    assert {x.data_ptr() for x in kept} == {heads.data_ptr(), lambda_.data_ptr()}


def test_sixteen_bits_are_subtracted_in_fp32_and_rounded_once():
    heads = torch.randn(2, 5, 8, 4).bfloat16()
    lambda_ = torch.rand(2, 5, 6)
    exact = subtract_noise(heads.float(), lambda_)
    assert torch.equal(subtract_noise(heads, lambda_), exact.bfloat16())
    lowered = lambda_.bfloat16().requires_grad_()
    (grad,) = torch.autograd.grad(subtract_noise(heads, lowered).sum(), lowered)
    assert grad.dtype == torch.bfloat16


def test_the_subtraction_can_be_differentiated_twice():
    heads, lambda_ = (x.requires_grad_() for x in (torch.randn(1, 2, 3, 2), torch.rand(1, 2, 2)))
    inputs = [x.detach().double().requires_grad_() for x in (heads, lambda_)]
    for sigmoid in (False, True):
        assert torch.autograd.gradgradcheck(partial(subtract_noise, sigmoid=sigmoid), inputs)


def test_the_subtraction_of_logits_is_that_of_their_sigmoid():
    heads = torch.randn(2, 5, 8, 4, dtype=torch.float64, requires_grad=True)
    logits = 3 * torch.randn(2, 5, 6, dtype=torch.float64)
    inputs = [heads, logits.requires_grad_()]
    found = value_and_grads(lambda *x: subtract_noise(*x, sigmoid=True), inputs)
    expected = value_and_grads(lambda h, x: subtract_noise(h, x.sigmoid()), inputs)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert relative_error(one, other) < 1e-14


def test_autocast_computes_as_if_the_inputs_were_cast():
    inputs = make_v2_inputs(rows=9, width=8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = diff_attention_v2(*inputs)
    lowered = diff_attention_v2(*(x.bfloat16() for x in inputs[:3]), inputs[3])
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, lowered)
