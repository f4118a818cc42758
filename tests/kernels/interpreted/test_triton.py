"""Tests of the Triton kernels in the interpreter, against PyTorch backends and loops.

The tests call the public functions on CPU tensors, as a user who debugs a kernel would. Blocks are
small, so that short sequences span several blocks. Most tests use float64, where a difference is a
mistake in the formulas and not a rounding error.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from diffmegatron.attention.kernels.api import (
    QKV,
    HeadwiseNorm,
    WholeAttention,
    chunk_attention,
    chunk_gradients,
    combine_maps,
    diff_attention,
    diff_attention_v2,
    softmax_attention,
    subtract_noise,
)
from diffmegatron.attention.kernels.configuration import BlockSizes
from diffmegatron.attention.kernels.costs import Sizes
from diffmegatron.attention.kernels.registry import DIFFERENTIAL
from diffmegatron.attention.kernels.triton import kernel_launch as launch
from diffmegatron.attention.kernels.triton import subtraction_kernel as subtraction
from diffmegatron.attention.kernels.triton.block_sizes import ChipClass
from tests.kernels.loops import (
    loop_diff_attention,
    loop_diff_attention_v2,
    make_inputs,
    make_v2_inputs,
    relative_error,
    value_and_grads,
)

NAMES = ("q1", "k1", "q2", "k2", "v", "lambda_", "norm weight")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for function in ("forward_blocks", "dkdv_blocks", "dq_blocks"):
        monkeypatch.setattr(launch, function, lambda *_: BlockSizes(16, 16, 4, 1))
    monkeypatch.setattr(launch, "PREPROCESS_ROWS", 16)
    monkeypatch.setattr(subtraction, "ROWS", 16)
    # With deterministic algorithms, torch fills new memory with NaN. An element that a kernel does
    # not write then stays NaN and fails a test.
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def in_form(one_pass=False, target=ChipClass.LARGE):
    """Set the form of the backward pass (split or one pass) and the GPU to choose kernels for."""
    with ExitStack() as stack:
        for name, value in (("is_one_pass", one_pass), ("target_for", target)):
            stack.enter_context(mock.patch.object(launch, name, lambda *_, value=value: value))
        yield


def triton_and_reference(inputs, norm=None, one_pass=False, target=ChipClass.LARGE, **options):
    """Return (out, gradients) of the kernels, and (out, gradients) of the reference in float64."""
    leaves = list(inputs) if norm is None else [*inputs, norm.weight]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    double_leaves = doubles if norm is None else [*doubles, norm.weight]

    def by(backend):
        return lambda *x: diff_attention(*x[:6], backend=backend, norm=norm, **options)

    with in_form(one_pass, target):
        found = value_and_grads(by("triton"), leaves)
    return found, value_and_grads(by("reference"), double_leaves)


def assert_close(actual, expected, tolerance):
    assert relative_error(actual[0], expected[0]) < tolerance
    for name, grad, wanted in zip(NAMES, actual[1], expected[1], strict=False):
        assert relative_error(grad, wanted) < tolerance, name


CASES = {
    "one row": {"rows": 1, "keys": 1},
    "decoding": {"rows": 1, "keys": 37, "heads": 2, "lambda_": 1e-6},
    "off the block, gqa 2, batch 2": {"batch": 2, "rows": 17},
    "s < t, width no power of 2": {"rows": 21, "keys": 37, "heads": 1, "width": 12},
    "s > t, lambda above 1": {"rows": 37, "keys": 21, "heads": 1, "lambda_": 1.9},
    "2 share a noise head": {"rows": 17, "heads": 4, "noise_heads": 2},
    "3 share one, batch 2": {"batch": 2, "rows": 5, "keys": 18, "heads": 3, "noise_heads": 1},
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_values_and_gradients(case, causal):
    inputs = make_inputs(**{"width": 16, **case})
    assert_close(*triton_and_reference(inputs, causal=causal), 1e-13)


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("target", [ChipClass.LARGE, ChipClass.HOPPER], ids=["pointers", "TMA"])
@pytest.mark.parametrize("noise_heads", [2, 1], ids=["fused", "grouped"])
def test_every_form_of_the_kernels(noise_heads, target, one_pass):
    inputs = make_inputs(rows=21, keys=37, heads=2, noise_heads=noise_heads, width=12)
    assert_close(*triton_and_reference(inputs, target=target, one_pass=one_pass), 1e-13)


def test_a_backends_name_has_form_and_block_sizes(monkeypatch):
    launched = []
    constants = launch._constants

    def remember(maps, blocks, problem):
        launched.append((*blocks[:4], problem.one_pass))
        return constants(maps, blocks, problem)

    monkeypatch.setattr(launch, "_constants", remember)
    torch.use_deterministic_algorithms(False)
    inputs = make_inputs(rows=21, keys=37, heads=2, noise_heads=1, width=12)
    expected = value_and_grads(lambda *x: diff_attention(*x, backend="reference"), inputs)
    for name, forward, backward in (
        ("triton:split+forward=32x16x2x1", (32, 16, 2, 1), [(16, 16, 4, 1), (16, 16, 4, 1)]),
        ("triton:split+dkdv=16x32x4x2", (16, 16, 4, 1), [(16, 32, 4, 2), (16, 16, 4, 1)]),
        ("triton:split+dq=64x16x4x1", (16, 16, 4, 1), [(16, 16, 4, 1), (64, 16, 4, 1)]),
        ("triton:one_pass+dkdv=32x16x4x1", (16, 16, 4, 1), [(32, 16, 4, 1)]),
    ):
        found = value_and_grads(lambda *x, name=name: diff_attention(*x, backend=name), inputs)
        assert_close(found, expected, 1e-13)
        assert launched == [(*sizes, "one_pass" in name) for sizes in (forward, *backward)]
        launched.clear()


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


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"window": 16, "query_offset": 20},
        {"window": 9, "cu_seqlens": torch.tensor([0, 4, 25, 90]), "query_offset": 7},
    ],
    ids=["whole", "chunk", "document chunk"],
)
@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("noise_heads", [2, 1], ids=["fused", "grouped"])
def test_windows(options, one_pass, noise_heads):
    inputs = make_inputs(rows=36, heads=2, noise_heads=noise_heads, width=16)
    assert_close(*triton_and_reference(inputs, one_pass=one_pass, **options), 1e-13)


def test_blocks_outside_a_window_are_neither_read_nor_computed():
    q1, *others = make_inputs(rows=16, keys=64, heads=1, width=16)
    # The 16 queries are at the end and see keys from 44 on, in the third and fourth block of 16.
    unseen = [x.detach().clone() for x in others[:-1]]
    for name, x in zip(("k1", "q2", "k2", "v"), unseen, strict=True):
        if name != "q2":
            x[:, :32] = torch.nan
    given = [x.requires_grad_() for x in unseen]
    attend = lambda *x: diff_attention(*x, backend="triton", window=5)  # noqa: E731
    out, grads = value_and_grads(attend, [q1, *given, others[-1]])
    expected, expected_grads = value_and_grads(attend, [q1, *others])
    assert torch.equal(out, expected)
    assert all(map(torch.equal, grads, expected_grads))


@pytest.mark.parametrize("noise_heads", [4, 2])
def test_triton_equals_the_loops(noise_heads):
    inputs = make_inputs(rows=19, heads=4, noise_heads=noise_heads, kv_heads=2, width=16)
    out = diff_attention(*inputs, backend="triton")
    assert relative_error(out, loop_diff_attention(*inputs)) < 1e-13


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize(
    ("width", "options"),
    [
        (16, {}),
        (12, {"causal": False}),
        (16, {"cu_seqlens": torch.tensor([0, 7, 40])}),
        (16, {"window": 11}),
    ],
    ids=["causal", "full", "documents", "window"],
)
def test_one_map_equals_the_reference(width, options, one_pass):
    q, k, _, _, v, _ = make_inputs(rows=20, keys=37, heads=2, width=width)
    options = {"query_offset": 17, **options}
    inputs = [q, k, v[..., :width].detach().requires_grad_()]
    with in_form(one_pass):
        found = value_and_grads(
            lambda *x: softmax_attention(*x, backend="triton", **options), inputs
        )
    expected = value_and_grads(
        lambda *x: softmax_attention(*x, backend="reference", **options), inputs
    )
    assert_close(found, expected, 1e-13)


@pytest.mark.parametrize(("heads", "ratio"), [(2, 1), (6, 3)])
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("sigmoid", [False, True], ids=["lambda", "logits"])
def test_the_subtraction_equals_pytorch(heads, ratio, strided, sigmoid):
    *_, lambda_ = make_v2_inputs(batch=2, rows=21, heads=heads, ratio=ratio)
    given = torch.randn(2, 12, heads + heads // ratio, 21, dtype=torch.float64)
    given = given.permute(0, 3, 2, 1) if strided else given.permute(0, 3, 2, 1).contiguous()
    inputs = [given.requires_grad_(), lambda_]
    found, expected = (
        value_and_grads(lambda *x, b=b: subtract_noise(*x, backend=b, sigmoid=sigmoid), inputs)
        for b in ("triton", "pytorch")
    )
    assert_close(found, expected, 1e-14)


def test_fp16_subtraction_accepts_a_float32_lambda():
    heads = torch.randn(1, 9, 3, 8).half().requires_grad_()
    lambda_ = torch.rand(1, 9, 2, requires_grad=True)
    found = value_and_grads(lambda *x: subtract_noise(*x, backend="triton"), [heads, lambda_])
    expected = value_and_grads(lambda *x: subtract_noise(*x, backend="pytorch"), [heads, lambda_])
    assert [x.dtype for x in found[1]] == [torch.float16, torch.float32]
    # Both backends compute in float32, and round to fp16 once.
    assert_close(found, expected, 2e-3)


def test_v2_equals_loops():
    inputs = make_v2_inputs(rows=17, heads=2, ratio=2, width=16)

    def by_triton(q, k, v, lambda_):
        heads = softmax_attention(q, k, v, backend="triton")
        return subtract_noise(heads, lambda_, backend="triton")

    expected = value_and_grads(loop_diff_attention_v2, inputs)
    assert_close(value_and_grads(by_triton, inputs), expected, 1e-13)
    with torch.no_grad():
        assert relative_error(diff_attention_v2(*inputs, backend="triton"), expected[0]) < 1e-13


@pytest.mark.parametrize(
    ("width", "eps", "weight"),
    [
        (12, 1e-3, torch.linspace(0.5, 1.5, 24).double()),
        (16, 0.0, torch.linspace(0.5, 1.5, 64).double()[::2]),
        (16, 1e-3, torch.ones(1).double().expand(32)),
    ],
    ids=["width no power of 2", "no eps, strided weight", "expanded weight"],
)
@pytest.mark.parametrize("noise_heads", [2, 1], ids=["fused", "grouped"])
def test_norm(noise_heads, width, eps, weight):
    inputs = make_inputs(rows=19, heads=2, noise_heads=noise_heads, width=width)
    norm = HeadwiseNorm(weight.requires_grad_(), eps=eps, scale=0.6)
    assert_close(*triton_and_reference(inputs, norm=norm), 1e-13)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The interpreter rounds to fp16 (relative error up to 2**-11 per cast), but truncates to bf16
    # (relative error up to 2**-7).
    [(torch.float32, 2e-6), (torch.float16, 2e-3), (torch.bfloat16, 2.5e-2)],
    ids=["fp32", "fp16", "bf16"],
)
@pytest.mark.parametrize("noise_heads", [2, 1], ids=["fused", "grouped"])
def test_lower_precision(noise_heads, dtype, tolerance):
    inputs = make_inputs(rows=20, heads=2, noise_heads=noise_heads, width=16, dtype=dtype)
    assert_close(*triton_and_reference(inputs), tolerance)


@pytest.mark.parametrize("causal", [True, False], ids=["causal, split", "full, one pass"])
@pytest.mark.parametrize("shift", [0.0, 40.0], ids=["large", "large and negative"])
def test_large_logits(shift, causal):
    """Check that outputs and gradients for large logits are finite and right.

    A kernel must mask the keys that pad the last block. Their score is 0, which is far above large
    negative logits.
    """
    q1, k1, q2, k2, v, lambda_ = make_inputs(rows=20, heads=1, width=16)
    scaled = [
        ((x + offset) * 25).detach().requires_grad_()
        for x, offset in zip((q1, k1, q2, k2), (shift, -shift, shift, -shift), strict=True)
    ]
    actual, expected = triton_and_reference(
        [*scaled, v, lambda_], causal=causal, one_pass=not causal
    )
    assert all(torch.isfinite(x).all() for x in (actual[0], *actual[1]))
    assert_close(actual, expected, 1e-9)


@pytest.mark.parametrize(
    ("count", "noise_heads", "bounds", "window", "one_pass"),
    [
        (2, 2, None, None, False),
        (2, 2, torch.tensor([0, 7, 26, 40]), None, True),
        (2, 1, None, None, True),
        (2, 1, torch.tensor([0, 7, 26, 40]), 5, False),
        (1, 2, torch.tensor([0, 7, 26, 40]), None, False),
        (2, 2, None, 9, False),
    ],
    ids=[
        *("fused", "fused, documents", "grouped", "grouped, documents, window"),
        *("one map, documents", "fused, window"),
    ],
)
def test_chunks_of_keys_add_up_to_the_whole(count, noise_heads, bounds, window, one_pass):
    inputs = make_inputs(rows=20, keys=40, heads=2, noise_heads=noise_heads, width=16)
    q1, k1, q2, k2, v, lambda_ = (x.detach() for x in inputs)
    if count == 1:
        v, lambda_ = v[..., :16].contiguous(), None
    queries, all_keys = (q1, q2)[:count], (k1, k2)[:count]
    options = {"cu_seqlens": bounds, "query_offset": 20, "window": window}
    whole_maps = QKV(queries, all_keys, v)
    outs, lses = zip(*chunk_attention(whole_maps, backend="reference", **options), strict=True)
    whole = WholeAttention(combine_maps(outs, lambda_), *outs[1:] or [None], lses)
    grad = torch.randn(whole.out.shape, generator=torch.Generator().manual_seed(3)).double()
    wanted = chunk_gradients(grad, whole_maps, lambda_, whole, backend="reference", **options)
    found = []
    with in_form(one_pass):
        for start, stop in ((0, 25), (25, 40)):
            part = QKV(queries, tuple(k[:, start:stop] for k in all_keys), v[:, start:stop])
            placed = {**options, "key_offset": start, "backend": "triton"}
            for (out, lse), (right, right_lse) in zip(
                chunk_attention(part, **placed),
                chunk_attention(part, **{**placed, "backend": "reference"}),
                strict=True,
            ):
                assert relative_error(out, right) < 1e-13
                assert relative_error(lse.exp(), right_lse.exp()) < 1e-13
            found.append(chunk_gradients(grad, part, lambda_, whole, **placed))
    first, second = found
    actual = [a + b for a, b in zip(first.queries, second.queries, strict=True)]
    actual += [torch.cat(both, 1) for both in zip(first.keys, second.keys, strict=True)]
    actual.append(torch.cat([first.v, second.v], 1))
    for grad_of, right in zip(actual, (*wanted.queries, *wanted.keys, wanted.v), strict=True):
        assert relative_error(grad_of, right) < 1e-12


def saved_bytes(function):
    """Return the bytes saved for the backward pass and for the output projection's input."""
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        heads = function()
        # The input of the output projection has Megatron's layout, [s, b, channels].
        keep(heads.flatten(2).transpose(0, 1).contiguous())
    return sum(storages.values())


def test_saved_activations_are_at_most_six_fifths_of_plain_attention():
    """Check that differential attention saves at most 6/5 of the bytes of plain attention.

    Differential attention saves six tensors of one size: q, k, v, out, out2 and the input of the
    output projection. Plain attention saves five, because it has no out2.
    """
    inputs = make_inputs(batch=2, rows=16, heads=2, kv_heads=2, width=64, dtype=torch.float16)
    weight = torch.ones(128, requires_grad=True)
    norm = HeadwiseNorm(weight, 1e-5, 0.2)
    mine = saved_bytes(lambda: diff_attention(*inputs, norm=norm, backend="triton"))
    plain = [torch.randn(2, 16, 4, 64, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    baseline = saved_bytes(lambda: softmax_attention(*plain))
    # Do not count lambda and the norm's weight, whose sizes do not depend on the length. The
    # log-sum-exps, one float32 per map and row, are counted.
    constants = 4 * (1 + weight.numel())
    assert (mine - constants) / baseline <= 1.2


def test_strided_and_misaligned_inputs():
    inputs = make_inputs(batch=2, rows=20, width=16)
    pairs = torch.stack(inputs[0:3:2], dim=3).detach()
    q1, q2 = pairs.unbind(3)
    k1, k2 = (torch.cat([x, x], -1)[..., 1:17].detach() for x in inputs[1:4:2])
    v = inputs[4].detach().transpose(0, 1).contiguous().transpose(0, 1)
    actual, expected = triton_and_reference(
        [x.requires_grad_() for x in (q1, k1, q2, k2, v)] + [inputs[5]],
        target=ChipClass.HOPPER,
    )
    assert_close(actual, expected, 1e-13)


def test_one_map_accepts_a_gradient_with_strides_invalid_for_tma():
    """Check a gradient of a batch of 1 with a batch stride that TMA descriptors do not accept.

    Such a gradient counts as contiguous, because `is_contiguous` ignores the stride of a dimension
    of size 1.
    """
    q, k, _, _, v, _ = make_inputs(rows=20, width=16)
    v = v[..., :16].detach().requires_grad_()
    with in_form(target=ChipClass.HOPPER):
        out = softmax_attention(q, k, v, backend="triton")
        grad = torch.randn_like(out)
        strange = grad.as_strided(grad.shape, (1, *grad.stride()[1:]))
        assert strange.is_contiguous()
        found = torch.autograd.grad(out, (q, k, v), strange)
    expected = softmax_attention(q, k, v, backend="reference")
    for actual, right in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        assert relative_error(actual, right) < 1e-13


@pytest.mark.parametrize("noise_heads", [2, 1], ids=["fused", "grouped"])
def test_saved_bytes_are_those_of_the_table(noise_heads):
    dtype = torch.float16
    inputs = make_inputs(rows=16, heads=2, noise_heads=noise_heads, width=16, dtype=dtype)
    storages = {}

    def keep(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = diff_attention(*inputs, backend="triton")
    for x in (*inputs, out):
        storages.pop(x.untyped_storage().data_ptr(), None)
    sizes = Sizes(2, 16, 2, noise_heads, kv_heads=1, keys=16)
    assert sum(storages.values()) == 16 * DIFFERENTIAL["triton"].saved(sizes)


def test_second_derivatives_are_refused():
    q, k, _, _, v, _ = make_inputs(rows=3, width=4)
    heads = torch.randn(1, 3, 2, 4, requires_grad=True)
    lambda_ = torch.rand(1, 3, 1, requires_grad=True)
    for out, x in (
        (softmax_attention(q, k, v[..., :4], backend="triton"), q),
        (subtract_noise(heads, lambda_, backend="triton"), lambda_),
    ):
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), x)


def test_more_heads_than_a_launch_has_are_refused():
    inputs = [x.expand(70000, *x.shape[1:]) for x in make_inputs(rows=1, heads=1, kv_heads=1)[:5]]
    with pytest.raises(ValueError, match="70000 heads in all; the triton backend takes 65535"):
        diff_attention(*inputs, torch.tensor(0.5), backend="triton")
