"""The Triton kernels, run by the interpreter on CPU tensors, against float64 loops and autograd.

Blocks are small, so that short sequences span several of them; float64 runs through the very same
kernels, so that gradcheck holds them to the maths and not to a rounding error.
"""

import pytest
import torch
from loops import loop_diff_attention, make_inputs, relative_error

from diffmegatron.attention.kernels import (
    HeadwiseNorm,
    Maps,
    PartialAttention,
    WholeAttention,
    merge_partial,
    reference,
    softmax_attention,
    triton_attention,
)
from diffmegatron.attention.kernels.triton_config import Blocks, Target
from diffmegatron.attention.kernels.validate import build_mask

NAMES = ("q1", "k1", "q2", "k2", "v", "lambda_")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for function in ("forward_blocks", "key_value_blocks", "query_blocks"):
        monkeypatch.setattr(triton_attention, function, lambda *_: Blocks(16, 16, 4, 1))
    monkeypatch.setattr(triton_attention, "ROW_SUMS_ROWS", 16)
    # Under deterministic algorithms torch fills new memory with NaN: what a kernel forgets shows.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def mask_of(inputs, causal=True, cu_seqlens=None, query_offset=None, key_offset=0):
    return build_mask(
        inputs[0].shape[1],
        inputs[1].shape[1],
        causal=causal,
        cu_seqlens=cu_seqlens,
        query_offset=query_offset,
        key_offset=key_offset,
    )


def triton_and_reference(inputs, norm=None, one_pass=False, target=Target.LARGE, **options):
    """((out, gradients) of the kernels, the same of the reference in float64)."""
    mask = mask_of(inputs, **options)
    scale = inputs[0].shape[-1] ** -0.5
    out = triton_attention.diff_attention(
        *inputs, softmax_scale=scale, mask=mask, norm=norm, one_pass=one_pass, target=target
    )
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    expected = reference.diff_attention(*doubles, softmax_scale=scale, mask=mask)
    leaves, double_leaves = list(inputs), list(doubles)
    if norm is not None:
        expected = norm.apply_to(expected)
        leaves.append(norm.weight)
        double_leaves.append(norm.weight)
    direction = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    grads = torch.autograd.grad(out, leaves, direction.to(out.dtype))
    wanted = torch.autograd.grad(expected, double_leaves, direction)
    return (out, grads), (expected, wanted)


def assert_close(actual, expected, tolerance):
    assert relative_error(actual[0], expected[0]) < tolerance
    names = (*NAMES, "norm weight")
    for name, grad, wanted in zip(names, actual[1], expected[1], strict=False):
        assert relative_error(grad, wanted) < tolerance, name


CASES = {
    "one block": {"rows": 16},
    "one row": {"rows": 1, "keys": 1},
    "decoding": {"rows": 1, "keys": 37, "heads": 4, "kv_heads": 2},
    "off the block, gqa 2": {"rows": 21, "heads": 4, "kv_heads": 2},
    "gqa 4, batch 2": {"batch": 2, "rows": 17, "heads": 4, "kv_heads": 1},
    "s < t": {"rows": 21, "keys": 37},
    "s > t": {"rows": 37, "keys": 21},
    "width no power of 2": {"rows": 20, "width": 12},
    "lambda near 0": {"rows": 20, "lambda_": 1e-6},
    "lambda above 1": {"rows": 20, "lambda_": 1.9},
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, causal):
    inputs = make_inputs(**{"width": 16, **case})
    assert_close(*triton_and_reference(inputs, causal=causal), 1e-13)


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("target", [Target.LARGE, Target.HOPPER], ids=["pointers", "TMA"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_form_of_the_kernels(causal, target, one_pass):
    inputs = make_inputs(rows=21, keys=37, heads=2, kv_heads=1, width=12)
    options = {"causal": causal, "target": target, "one_pass": one_pass}
    assert_close(*triton_and_reference(inputs, **options), 1e-13)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "options",
    [
        {"query_offset": 3},
        {"query_offset": 4, "key_offset": 20},
        {"query_offset": 0, "key_offset": 60},
        {"cu_seqlens": torch.tensor([0, 1, 17, 30, 36])},
        {"cu_seqlens": torch.tensor([0, 4, 25, 90]), "query_offset": 20},
        {"cu_seqlens": torch.tensor([0, 4, 25, 90]), "query_offset": 7, "key_offset": 16},
    ],
    ids=["chunk", "partly later keys", "only later keys", "documents", "doc chunk", "both"],
)
def test_offsets_and_documents(options, causal):
    inputs = make_inputs(rows=36, heads=1, width=16)
    assert_close(
        *triton_and_reference(inputs, causal=causal, one_pass=not causal, **options), 1e-13
    )


def test_the_loops_agree_too():
    inputs = make_inputs(rows=19, heads=4, kv_heads=2, width=16)
    out = triton_attention.diff_attention(*inputs, softmax_scale=0.25, mask=mask_of(inputs))
    assert relative_error(out, loop_diff_attention(*inputs)) < 1e-13


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
def test_gradcheck(one_pass):
    inputs = make_inputs(rows=3, keys=4, heads=2, kv_heads=1, width=2)
    mask = mask_of(inputs)
    assert torch.autograd.gradcheck(
        lambda *x: triton_attention.diff_attention(
            *x, softmax_scale=0.7, mask=mask, one_pass=one_pass
        ),
        inputs,
        fast_mode=True,
    )


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("width", [16, 12])
def test_norm_epilogue(width, one_pass):
    inputs = make_inputs(rows=20, heads=2, kv_heads=1, width=width)
    weight = torch.linspace(0.5, 1.5, 2 * width, dtype=torch.float64, requires_grad=True)
    norm = HeadwiseNorm(weight, eps=1e-3, scale=0.6)
    assert_close(*triton_and_reference(inputs, norm=norm, one_pass=one_pass), 1e-13)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The interpreter truncates where the hardware rounds: 2**-8 and 2**-11 for one cast.
    [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2.5e-2)],
    ids=["fp32", "fp16", "bf16"],
)
def test_lower_precision(dtype, tolerance):
    inputs = make_inputs(rows=20, width=16, dtype=dtype)
    assert_close(*triton_and_reference(inputs), tolerance)


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shift", [0.0, 40.0], ids=["large", "large and negative"])
def test_large_logits(shift, causal, one_pass):
    """Negative ones far below the score 0 that keys past the end have, unless masked."""
    q1, k1, q2, k2, v, lambda_ = make_inputs(rows=20, width=16)
    scaled = [
        ((x + offset) * 25).detach().requires_grad_()
        for x, offset in zip((q1, k1, q2, k2), (shift, -shift, shift, -shift), strict=True)
    ]
    actual, expected = triton_and_reference([*scaled, v, lambda_], causal=causal, one_pass=one_pass)
    assert all(torch.isfinite(x).all() for x in (actual[0], *actual[1]))
    assert_close(actual, expected, 1e-9)


def test_partial_results_merge_to_the_whole():
    inputs = make_inputs(rows=20, keys=40, heads=2, kv_heads=1, width=16)
    q1, k1, q2, k2, v, lambda_ = inputs
    partials = []
    for start, stop in ((0, 25), (25, 40)):
        keys = [x[:, start:stop] for x in (k1, k2, v)]
        mask = mask_of([q1, keys[0]], query_offset=20, key_offset=start)
        options = {"softmax_scale": 0.25, "mask": mask}
        out1, lse1 = triton_attention.attention_with_lse(q1, keys[0], keys[2], **options)
        out2, lse2 = triton_attention.attention_with_lse(q2, keys[1], keys[2], **options)
        partials.append(PartialAttention(out1, out2, lse1, lse2))
    merged = merge_partial(*partials).output(lambda_)
    expected = reference.diff_attention(*inputs, softmax_scale=0.25, mask=mask_of(inputs))
    assert relative_error(merged, expected) < 1e-13
    grads = torch.autograd.grad(merged.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    assert_close((merged, grads), (expected, wanted), 1e-12)


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("bounds", [None, torch.tensor([0, 7, 26, 40])], ids=["one", "documents"])
def test_chunks_of_keys_add_up_to_the_whole(bounds, one_pass, monkeypatch):
    monkeypatch.setattr(triton_attention, "default_one_pass", lambda *_: one_pass)
    inputs = make_inputs(rows=20, keys=40, heads=2, kv_heads=1, width=16)
    q1, k1, q2, k2, v, lambda_ = (x.detach() for x in inputs)
    mask = mask_of(inputs, query_offset=20, cu_seqlens=bounds)
    expected = reference.diff_attention(*inputs, softmax_scale=0.25, mask=mask)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3)).double()
    wanted = torch.autograd.grad(expected, inputs[:5], grad)
    (out1, lse1), (out2, lse2) = (
        reference.attention_with_lse(q, k, v, softmax_scale=0.25, mask=mask)
        for q, k in ((q1, k1), (q2, k2))
    )
    whole = WholeAttention(out1 - lambda_ * out2, out2, (lse1, lse2))
    dqs, keys_and_values = [torch.zeros_like(q1) for _ in range(2)], []
    for start, stop in ((0, 25), (25, 40)):
        keys = [x[:, start:stop] for x in (k1, k2, v)]
        part = mask_of([q1, keys[0]], query_offset=20, key_offset=start, cu_seqlens=bounds)
        found = triton_attention.chunk_gradients(
            grad, Maps((q1, q2), (keys[0], keys[1]), keys[2]), lambda_, whole,
            softmax_scale=0.25, mask=part,
        )  # fmt: skip
        dqs = [total + dq for total, dq in zip(dqs, found.queries, strict=True)]
        keys_and_values.append([*found.keys, found.v])
    dk1, dk2, dv = (torch.cat(parts, 1) for parts in zip(*keys_and_values, strict=True))
    for actual, right in zip((dqs[0], dk1, dqs[1], dk2, dv), wanted, strict=True):
        assert relative_error(actual, right) < 1e-12


def test_a_norm_without_eps_off_the_block():
    inputs = make_inputs(rows=19, heads=2, kv_heads=1, width=16)
    weight = torch.linspace(0.5, 1.5, 32, dtype=torch.float64, requires_grad=True)
    assert_close(*triton_and_reference(inputs, norm=HeadwiseNorm(weight, 0.0, 0.6)), 1e-13)


def saved_bytes(function):
    """Of the tensors that a backward pass will need, each storage once, with the result itself."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        heads = function()
        # The output projection's input, as Megatron lays it out: [s, b, channels].
        keep(heads.flatten(2).transpose(0, 1).contiguous())
    return sum(storages.values())


def test_saved_activations_are_six_fifths_of_the_transformers():
    """q, k, v, out, out2 and the projection's input to q, k, v, out and the projection's input."""
    inputs = make_inputs(batch=2, rows=16, heads=2, kv_heads=2, width=64, dtype=torch.float16)
    weight = torch.ones(128, requires_grad=True)
    norm = HeadwiseNorm(weight, 1e-5, 0.2)
    options = {"softmax_scale": 0.125, "mask": mask_of(inputs), "norm": norm}
    mine = saved_bytes(lambda: triton_attention.diff_attention(*inputs, **options))
    plain = [torch.randn(2, 16, 4, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    twin = saved_bytes(lambda: softmax_attention(*plain))
    # Beside these float32: lambda, the norm's weight, and a log-sum-exp per map and row.
    constants = 4 * (1 + weight.numel())
    assert (mine - constants) / twin <= 1.2


def test_strided_and_misaligned_inputs():
    inputs = make_inputs(batch=2, rows=20, width=16)
    pairs = torch.stack(inputs[0:3:2], dim=3).detach()
    q1, q2 = pairs.unbind(3)
    k1, k2 = (torch.cat([x, x], -1)[..., 1:17].detach() for x in inputs[1:4:2])
    v = inputs[4].detach().transpose(0, 1).contiguous().transpose(0, 1)
    actual, expected = triton_and_reference(
        [x.requires_grad_() for x in (q1, k1, q2, k2, v)] + [inputs[5]],
        target=Target.HOPPER,
    )
    assert_close(actual, expected, 1e-13)


def test_a_norm_weight_of_any_layout():
    inputs = make_inputs(rows=20, width=16)
    for weight in (torch.linspace(0.5, 1.5, 64).double()[::2], torch.ones(1).double().expand(32)):
        norm = HeadwiseNorm(weight.requires_grad_(), eps=1e-3, scale=0.6)
        assert_close(*triton_and_reference(inputs, norm=norm), 1e-13)


def test_gradients_of_one_map_in_strides_that_descriptors_refuse():
    """A batch of one may have any stride, which `is_contiguous` overlooks."""
    inputs = make_inputs(rows=20, width=16)
    problem = triton_attention.Problem(0.25, mask_of(inputs), False, Target.HOPPER)
    q, k, v = inputs[0], inputs[1], inputs[4]
    out, _ = triton_attention._TritonSoftmaxAttention.apply(q, k, v, problem)
    grad = torch.randn_like(out)
    strange = grad.as_strided(grad.shape, (1, *grad.stride()[1:]))
    assert strange.is_contiguous()
    found = torch.autograd.grad(out, (q, k, v), strange)
    no_map2 = torch.tensor(0.0).double()
    expected = loop_diff_attention(q, k, q, k, v, no_map2)
    for actual, right in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert relative_error(actual, right) < 1e-13


def test_more_heads_than_a_launch_has_are_refused():
    inputs = [x.expand(70000, *x.shape[1:]) for x in make_inputs(rows=1, heads=1, kv_heads=1)[:5]]
    with pytest.raises(ValueError, match="70000 heads in all; the triton backend takes 65535"):
        triton_attention.diff_attention(
            *inputs, torch.tensor(0.5), softmax_scale=1.0, mask=mask_of(inputs)
        )
