"""Tests of the values and gradients of `reference` and `blocked` against float64 loops.

Wrong variants of the computation (mutations) must differ from the loops.
"""

import pytest
import torch

from diffmegatron.attention.kernels.api import diff_attention
from diffmegatron.attention.kernels.masks import build_mask
from diffmegatron.attention.kernels.pytorch.blocked import ROWS_PER_BLOCK
from tests.kernels.loops import loop_diff_attention, make_inputs, relative_error, value_and_grads

BACKENDS = ("reference", "blocked")
SHAPES = {
    "one row": {"rows": 1},
    "odd length": {"rows": 13, "heads": 3, "kv_heads": 3},
    "gqa 2": {"batch": 2, "rows": 9, "heads": 4, "kv_heads": 2},
    "gqa 4": {"batch": 1, "rows": 6, "heads": 8, "kv_heads": 2},
    "decoding": {"rows": 1, "keys": 11, "heads": 4, "kv_heads": 2},
    "s < t": {"rows": 5, "keys": 12},
    "s > t": {"rows": 9, "keys": 4, "batch": 2},
    "lambda near 0": {"lambda_": 1e-6},
    "lambda above 1": {"lambda_": 1.9},
    "2 signal heads share a noise head": {"rows": 9, "heads": 4, "noise_heads": 2},
    "3 share one, gqa": {"batch": 2, "rows": 6, "heads": 12, "noise_heads": 4, "kv_heads": 2},
    "all share one, s < t": {"rows": 5, "keys": 12, "heads": 3, "noise_heads": 1},
}


def assert_equal_to_loops(inputs, tolerance, *, backend, causal=True, **options):
    loop_options = dict(options)
    if (bounds := loop_options.pop("cu_seqlens", None)) is not None:
        loop_options["bounds"] = tuple(bounds.tolist())
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    actual, grads = value_and_grads(
        lambda *x: diff_attention(*x, causal=causal, backend=backend, **options), inputs
    )
    expected, expected_grads = value_and_grads(
        lambda *x: loop_diff_attention(*x, causal=causal, **loop_options), doubles
    )
    assert actual.dtype == inputs[4].dtype
    assert relative_error(actual, expected) < tolerance
    for name, x, grad, wanted in zip(
        ("q1", "k1", "q2", "k2", "v", "lambda_"), inputs, grads, expected_grads, strict=True
    ):
        assert grad.dtype == x.dtype
        assert relative_error(grad, wanted) < tolerance, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_float64_equals_loops(backend, causal, shape):
    assert_equal_to_loops(make_inputs(**shape), 1e-12, backend=backend, causal=causal)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("keys", [2 * ROWS_PER_BLOCK + 3, 3 * ROWS_PER_BLOCK])
@pytest.mark.parametrize("noise_heads", [2, 1])
def test_several_row_blocks_equal_the_reference(causal, keys, noise_heads):
    rows = 2 * ROWS_PER_BLOCK + 3
    inputs = make_inputs(rows=rows, keys=keys, heads=2, noise_heads=noise_heads, width=8)
    blocked, blocked_grads = value_and_grads(
        lambda *x: diff_attention(*x, causal=causal, backend="blocked"), inputs
    )
    plain, plain_grads = value_and_grads(
        lambda *x: diff_attention(*x, causal=causal, backend="reference"), inputs
    )
    assert relative_error(blocked, plain) < 1e-12
    for actual, expected in zip(blocked_grads, plain_grads, strict=True):
        assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_gradcheck_of_blocked(causal):
    inputs = make_inputs(rows=5, keys=6, heads=2, kv_heads=1, width=3)
    assert torch.autograd.gradcheck(
        lambda *x: diff_attention(*x, causal=causal, backend="blocked"), inputs
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-6), (torch.float16, 1.5e-3), (torch.bfloat16, 1e-2)],
    ids=["fp32", "fp16", "bf16"],
)
def test_lower_precision_is_close_to_float64_of_the_same_inputs(dtype, tolerance):
    inputs = make_inputs(rows=12, heads=4, noise_heads=2, kv_heads=2, width=8, dtype=dtype)
    assert_equal_to_loops(inputs, tolerance, backend="blocked")


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_do_not_overflow(backend):
    q1, k1, q2, k2, v, lambda_ = make_inputs(rows=8, dtype=torch.float32)
    scaled = [(x * 60).detach().requires_grad_() for x in (q1, k1, q2, k2)]
    assert_equal_to_loops([*scaled, v, lambda_], 1e-3, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_scale_replaces_one_over_sqrt_d(backend):
    inputs = make_inputs()
    out = diff_attention(*inputs, softmax_scale=0.3, backend=backend)
    assert relative_error(out, loop_diff_attention(*inputs, scale=0.3)) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "options",
    [
        {"query_offset": 3, "key_offset": 0},
        {"query_offset": 4, "key_offset": 6},
        {"query_offset": 0, "key_offset": 20},
        {"cu_seqlens": torch.tensor([0, 1, 5, 9])},
        {"cu_seqlens": torch.tensor([0, 4, 12, 30], dtype=torch.int32), "query_offset": 8},
        {"cu_seqlens": torch.tensor([0, 4, 12, 30]), "query_offset": 7, "key_offset": 6},
    ],
    ids=["chunk", "partly later keys", "only later keys", "documents", "doc chunk", "both offset"],
)
def test_offsets_and_documents_equal_loops(backend, causal, options):
    inputs = make_inputs(batch=2, rows=9, heads=4, noise_heads=2, kv_heads=2, width=3)
    assert_equal_to_loops(inputs, 1e-12, backend=backend, causal=causal, **options)


WINDOWS = {
    "one key": {"window": 1},
    "three keys": {"window": 3},
    "all keys but one": {"window": 8},
    "chunk": {"window": 4, "query_offset": 5, "key_offset": 0},
    "no visible key": {"window": 4, "query_offset": 12, "key_offset": 0},
    "documents": {"window": 3, "cu_seqlens": torch.tensor([0, 1, 5, 9])},
    "document chunk": {
        "window": 5,
        "cu_seqlens": torch.tensor([0, 4, 12, 30]),
        "query_offset": 7,
        "key_offset": 6,
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS)
def test_windows_equal_loops(backend, options):
    inputs = make_inputs(batch=2, rows=9, heads=4, noise_heads=2, kv_heads=2, width=3)
    assert_equal_to_loops(inputs, 1e-12, backend=backend, **options)


@pytest.mark.parametrize("window", [1, 7, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 5])
def test_windows_over_several_row_blocks_equal_the_reference(window):
    inputs = make_inputs(rows=2 * ROWS_PER_BLOCK + 3, heads=2, noise_heads=1, width=4)
    (out, grads), (expected, expected_grads) = (
        value_and_grads(
            lambda *x, name=name: diff_attention(*x, window=window, backend=name), inputs
        )
        for name in ("blocked", "reference")
    )
    assert relative_error(out, expected) < 1e-12
    for actual, wanted in zip(grads, expected_grads, strict=True):
        assert relative_error(actual, wanted) < 1e-12


@pytest.mark.parametrize(
    ("window", "options"),
    [(9, {}), (10**9, {}), (5, {"cu_seqlens": torch.tensor([0, 4, 9])})],
    ids=["sequence", "longer", "longest document"],
)
def test_a_window_that_hides_no_key_changes_no_bit(window, options):
    inputs = make_inputs(rows=9, dtype=torch.float32)
    (out, grads), (plain, plain_grads) = (
        value_and_grads(lambda *x, given=given: diff_attention(*x, **given), inputs)
        for given in (options | {"window": window}, options)
    )
    assert torch.equal(out, plain)
    assert all(map(torch.equal, grads, plain_grads))
    # Other backends, too, get the same mask and run the same kernel.
    assert build_mask(9, 9, window=window, **options) == build_mask(9, 9, **options)


def test_documents_longer_than_a_row_block_equal_each_document_alone():
    lengths = (ROWS_PER_BLOCK + 9, 3, ROWS_PER_BLOCK - 5)
    inputs = make_inputs(rows=sum(lengths), width=4)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
    packed, packed_grads = value_and_grads(
        lambda *x: diff_attention(*x, cu_seqlens=bounds, backend="blocked"), inputs
    )

    def alone(*x):
        pieces = zip(*(tensor.split(lengths, dim=1) for tensor in x[:5]), strict=True)
        return torch.cat([diff_attention(*piece, x[5], backend="blocked") for piece in pieces], 1)

    expected, expected_grads = value_and_grads(alone, inputs)
    assert relative_error(packed, expected) < 1e-13
    for actual, wanted in zip(packed_grads, expected_grads, strict=True):
        assert relative_error(actual, wanted) < 1e-12


MUTATIONS = {
    "q1 and q2 swapped": lambda q1, k1, q2, k2, v, lam: diff_attention(q2, k1, q1, k2, v, lam),
    "k1 and k2 swapped": lambda q1, k1, q2, k2, v, lam: diff_attention(q1, k2, q2, k1, v, lam),
    "sign of lambda": lambda q1, k1, q2, k2, v, lam: diff_attention(q1, k1, q2, k2, v, -lam),
    "maps swapped": lambda q1, k1, q2, k2, v, lam: diff_attention(q2, k2, q1, k1, v, lam),
    "mask dropped": lambda *x: diff_attention(*x, causal=False),
    "mask off by one": lambda *x: diff_attention(*x, query_offset=1),
    "window": lambda *x: diff_attention(*x, window=6),
    "heads tiled over kv heads": lambda q1, k1, q2, k2, v, lam: diff_attention(
        q1, *(x[:, :, [0, 1, 0, 1]] if x.shape[2] == 2 else x for x in (k1, q2, k2, v)), lam
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS)
def test_mutations_differ_from_the_loops(mutation):
    inputs = make_inputs(rows=8, heads=4, kv_heads=2)
    assert relative_error(mutation(*inputs), loop_diff_attention(*inputs)) > 0.1


def test_consecutive_signal_heads_share_a_noise_head():
    q1, k1, q2, k2, v, lambda_ = make_inputs(rows=8, heads=4, noise_heads=2)
    out = diff_attention(q1, k1, q2, k2, v, lambda_)
    each = diff_attention(q1, k1, q2[:, :, [0, 0, 1, 1]], k2, v, lambda_)
    tiled = diff_attention(q1, k1, q2[:, :, [0, 1, 0, 1]], k2, v, lambda_)
    assert relative_error(out, each) < 1e-14
    assert relative_error(out, tiled) > 0.1


def test_blocked_is_bit_deterministic():
    inputs = make_inputs(batch=2, rows=300, heads=4, kv_heads=2, width=16, dtype=torch.float32)
    runs = [
        value_and_grads(lambda *x: diff_attention(*x, backend="blocked"), inputs) for _ in range(3)
    ]
    for out, grads in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert all(map(torch.equal, grads, runs[0][1]))


def test_inputs_need_not_be_contiguous():
    inputs = make_inputs(batch=2, rows=6, heads=4, kv_heads=2)
    strided = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:5]]
    out = diff_attention(*strided, inputs[5], backend="blocked")
    assert torch.equal(out, diff_attention(*inputs, backend="blocked"))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(use_reentrant):
    inputs = make_inputs(rows=20, dtype=torch.float32)
    plain = value_and_grads(diff_attention, inputs)
    again = (
        value_and_grads(
            lambda *x: torch.utils.checkpoint.checkpoint(
                diff_attention, *x, use_reentrant=use_reentrant
            ),
            inputs,
        )
        if not use_reentrant
        else _reentrant_checkpoint(inputs)
    )
    assert torch.equal(again[0], plain[0])
    assert all(map(torch.equal, again[1], plain[1]))


def _reentrant_checkpoint(inputs):
    """Return (out, gradients) by backward(): reentrant checkpoints do not support autograd.grad."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = torch.utils.checkpoint.checkpoint(diff_attention, *leaves, use_reentrant=True)
    direction = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    out.backward(direction.to(out.dtype))
    return out, [x.grad for x in leaves]


def test_autocast_computes_as_if_the_inputs_were_cast():
    inputs = make_inputs(rows=20, width=8, dtype=torch.float32)
    lowered = [x.detach().bfloat16().requires_grad_() for x in inputs[:5]]
    lowered.append(inputs[5].detach().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = value_and_grads(diff_attention, inputs)
    expected, expected_grads = value_and_grads(diff_attention, lowered)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected)
    for x, grad, wanted in zip(inputs, grads, expected_grads, strict=True):
        assert grad.dtype == x.dtype == torch.float32
        assert torch.equal(grad, wanted.float())


def test_no_grad_gives_the_same_value_and_no_graph():
    inputs = make_inputs(rows=20)
    with torch.no_grad():
        out = diff_attention(*inputs)
    assert not out.requires_grad
    assert torch.equal(out, diff_attention(*inputs))
