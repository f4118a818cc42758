"""Tests of the attention kernels on a GPU at real sizes: pytest tests/gpu/test_kernels_gpu.py.

The reference is the backend `blocked` in fp32 on the same values. It stores only some rows of an
attention map at a time, never the whole map, so that 64K positions fit into memory. These tests
have not run yet, because they were written on a machine without a GPU.
"""

import pytest
import torch

from diffmegatron.attention.kernels.api import (
    QKV,
    HeadwiseNorm,
    WholeAttention,
    backend_table,
    chunk_attention,
    chunk_gradients,
    combine_maps,
    diff_attention,
    diff_attention_v2,
    merge_maps,
    softmax_attention,
    subtract_noise,
)
from diffmegatron.attention.kernels.call import AttentionCall
from diffmegatron.attention.kernels.configuration import Configuration
from diffmegatron.attention.kernels.registry import BACKENDS, DIFFERENTIAL

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, this machine has none"
)

NAMES = ("q1", "k1", "q2", "k2", "v", "lambda_")
# Allowed norm of the error of a tensor, relative to the tensor's norm. Inputs, maps and results are
# each rounded to the dtype once. Tensor cores round float32 to tf32. In an emulation on a CPU, this
# rounding alone causes an error of 2.1e-3 in the gradients. The tolerance of 3e-3 also allows for
# other differences of a GPU: the order of sums, and less exact exponentials.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 3e-3}
# Factor on TOLERANCE for the largest error of an element, relative to the largest element. This
# check detects a single wrong row among thousands.
OUTLIER = 4
# The widths of every dtype, and those of bf16 and fp16 alone, whose backward pass is split.
WIDTHS = DIFFERENTIAL["triton"].dtype_head_dims["float32"]
WIDE = [width for width in DIFFERENTIAL["triton"].head_dims if width not in WIDTHS]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runnable(op):
    """Return the backends that run on this GPU, without `reference` and `blocked`."""
    if not torch.cuda.is_available():
        return []
    table = backend_table(op)
    return [name for name, runs, _ in table if runs and name not in ("reference", "blocked")]


def with_windows(op):
    """Return the backends of `runnable` that compute windows."""
    return [name for name in runnable(op) if "windows" not in BACKENDS[op][name].lacks]


def draw_inputs(
    length,
    *,
    batch=1,
    heads=4,
    noise_heads=None,
    kv_heads=2,
    width=128,
    dtype=torch.bfloat16,
    keys=None,
):
    torch.manual_seed(length + width)
    keys = keys or length

    def draw(rows, count, columns):
        x = torch.randn(batch, rows, count, columns, device="cuda", dtype=dtype)
        return x.requires_grad_()

    q1, q2 = (draw(length, count, width) for count in (heads, noise_heads or heads))
    k1, k2 = (draw(keys, kv_heads, width) for _ in range(2))
    lambda_ = torch.tensor(0.7, device="cuda", requires_grad=True)
    return [q1, k1, q2, k2, draw(keys, kv_heads, 2 * width), lambda_]


def value_and_grads(function, inputs):
    out = function(*inputs)
    direction = torch.randn(
        out.shape, generator=torch.Generator("cuda").manual_seed(3), device="cuda"
    )
    return out, torch.autograd.grad(out, inputs, direction.to(out.dtype))


def assert_close(actual, expected, tolerance, name=None):
    error = actual.detach().float() - expected.detach().float()
    expected = expected.detach().float()
    assert error.norm() < tolerance * expected.norm(), name
    assert error.abs().max() < OUTLIER * tolerance * expected.abs().max(), name


def assert_equals_blocked(inputs, compute, norm=None, **options):
    """Compare output and gradients, also of the norm's weight, with `blocked` in fp32."""
    exact = [x.detach().float().requires_grad_() for x in inputs]
    expected = diff_attention(*exact, backend="blocked", **options)
    normed = expected if norm is None else norm.apply_to(expected)
    actual = compute(*inputs)
    tolerance = TOLERANCE[inputs[0].dtype]
    assert_close(actual, normed, tolerance)
    direction = torch.randn_like(actual)
    weights = [] if norm is None else [norm.weight]
    grads = torch.autograd.grad(actual, [*inputs, *weights], direction)
    grad, *of_norm = torch.autograd.grad(
        normed, [expected, *weights], direction.float(), retain_graph=True
    )
    wanted = [*torch.autograd.grad(expected, exact, grad), *of_norm]
    for name, found, right in zip((*NAMES, "weight"), grads, wanted, strict=False):
        if name != "lambda_":
            assert_close(found, right, tolerance, name)
    # The gradient of lambda is a sum of rounded terms, one per row and head. Terms of opposite sign
    # cancel, so the sum can be much smaller than the terms. Therefore, measure the error of the sum
    # relative to the norm of the terms.
    with torch.no_grad():
        maps = QKV((exact[0], exact[2]), (exact[1], exact[3]), exact[4])
        _, (out2, _) = chunk_attention(maps, backend="blocked", **options)
    rows = (grad * out2.repeat_interleave(grad.shape[2] // out2.shape[2], dim=2)).sum(-1)
    assert abs(grads[5] - wanted[5]) < OUTLIER * tolerance * rows.norm(), "lambda_"


def triton(*inputs, one_pass=False, norm=None, causal=True):
    """Run the Triton kernels with a one-pass or a split backward pass."""
    call = AttentionCall.checked(QKV.of(*inputs[:5]), inputs[5], norm, causal=causal)
    return DIFFERENTIAL["triton"].load().attend(call, Configuration(one_pass=one_pass))


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("width", WIDTHS)
def test_triton_at_4k(width, causal, one_pass):
    assert_equals_blocked(
        draw_inputs(4096, batch=2, width=width),
        lambda *x: triton(*x, one_pass=one_pass, causal=causal),
        causal=causal,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_triton_equals_blocked_at_length_1037_in_every_dtype(width, dtype):
    assert_equals_blocked(draw_inputs(1037, width=width, dtype=dtype), triton)


@pytest.mark.parametrize("length", [16384, 65536])
def test_triton_at_long_lengths(length):
    assert_equals_blocked(draw_inputs(length, heads=1, kv_heads=1), triton)


@pytest.mark.parametrize("backend", runnable("differential"))
def test_every_runnable_backend_equals_blocked(backend):
    inputs = draw_inputs(1024, batch=2)
    assert_equals_blocked(inputs, lambda *x: diff_attention(*x, backend=backend))


@pytest.mark.parametrize("backend", runnable("differential"))
def test_every_runnable_backend_equals_blocked_with_documents(backend):
    options = {"cu_seqlens": torch.tensor([0, 5, 700, 701, 1024])}
    assert_equals_blocked(
        draw_inputs(1024, batch=2),
        lambda *x: diff_attention(*x, backend=backend, **options),
        **options,
    )


@pytest.mark.parametrize("documents", [None, torch.tensor([0, 5, 700, 701, 1024])])
@pytest.mark.parametrize("backend", with_windows("differential"))
def test_every_runnable_backend_equals_blocked_with_windows(backend, documents):
    options = {"window": 300, "cu_seqlens": documents}
    assert_equals_blocked(
        draw_inputs(1024, batch=2),
        lambda *x: diff_attention(*x, backend=backend, **options),
        **options,
    )


@pytest.mark.parametrize("backend", runnable("differential"))
def test_every_runnable_backend_equals_blocked_with_fewer_queries_than_keys(backend):
    inputs = draw_inputs(300, batch=2, keys=1037)
    assert_equals_blocked(inputs, lambda *x: diff_attention(*x, backend=backend))


@pytest.mark.parametrize(
    "options",
    [
        {"cu_seqlens": torch.tensor([0, 5, 700, 701, 2048])},
        {"query_offset": 1000, "key_offset": 300},
        {"cu_seqlens": torch.tensor([0, 5, 700, 9000]), "query_offset": 1000, "key_offset": 300},
    ],
    ids=["documents", "offsets", "document chunk"],
)
def test_triton_documents_and_offsets(options):
    inputs = draw_inputs(2048)
    assert_equals_blocked(
        inputs, lambda *x: diff_attention(*x, backend="triton", **options), **options
    )


@pytest.mark.parametrize("noise_heads", [4, 2], ids=["fused", "grouped"])
@pytest.mark.parametrize("width", WIDE)
def test_triton_at_wide_heads(width, noise_heads):
    assert_equals_blocked(draw_inputs(1037, noise_heads=noise_heads, width=width), triton)


def test_triton_decoding_one_row():
    assert_equals_blocked(draw_inputs(1, keys=4099), triton)


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("width", WIDTHS)
def test_triton_with_shared_noise_heads(width, one_pass):
    inputs = draw_inputs(2048, heads=8, noise_heads=2, width=width)
    assert_equals_blocked(inputs, lambda *x: triton(*x, one_pass=one_pass))


@pytest.mark.parametrize("backend", runnable("differential"))
def test_every_runnable_backend_equals_blocked_with_shared_noise_heads(backend):
    inputs = draw_inputs(1024, batch=2, heads=6, noise_heads=2)
    weight = torch.linspace(0.5, 1.5, 256, device="cuda", requires_grad=True)
    norm = HeadwiseNorm(weight, 1e-5, 0.3)
    assert_equals_blocked(
        inputs, lambda *x: diff_attention(*x, backend=backend, norm=norm), norm=norm
    )


def draw_v2_inputs(length, *, heads=6, ratio=3, kv_heads=2, width=128, dtype=torch.bfloat16):
    torch.manual_seed(length + width)
    shapes = ((heads + heads // ratio, width), (kv_heads, width), (kv_heads, width))
    inputs = [torch.randn(2, length, *shape, device="cuda", dtype=dtype) for shape in shapes]
    inputs.append(torch.rand(2, length, heads, device="cuda"))
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("ratio", [1, 3])
@pytest.mark.parametrize("sigmoid", [False, True], ids=["lambda", "logits"])
def test_triton_subtraction_equals_pytorch(sigmoid, ratio, width, dtype):
    q, _, _, lambda_ = draw_v2_inputs(1037, ratio=ratio, width=width, dtype=dtype)
    (out, grads), (right, wanted) = (
        value_and_grads(
            lambda *x, name=name: subtract_noise(*x, backend=name, sigmoid=sigmoid), [q, lambda_]
        )
        for name in ("triton", "pytorch")
    )
    for name, actual, expected in zip(
        ("out", "heads", "lambda_"), (out, *grads), (right, *wanted), strict=True
    ):
        # Both backends compute in fp32, and round once.
        assert_close(actual, expected, 1e-2 if dtype == torch.bfloat16 else 1e-3, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [1000, 100_288])
def test_cross_entropy_kernel_equals_torch(words, dtype):
    from diffmegatron.model.cross_entropy_kernel import cross_entropy

    def with_z_loss(losses, log_total):
        return losses + 0.1 * log_total.square()

    logits = (4 * torch.randn(512, words, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(0, words, (512,), device="cuda")
    (out, (grad,)), (right, (wanted,)) = (
        value_and_grads(function, [logits])
        for function in (
            # Copy, because the gradient overwrites the logits.
            lambda x: with_z_loss(*cross_entropy(x.clone(), labels)),
            lambda x: with_z_loss(
                torch.nn.functional.cross_entropy(x.float(), labels, reduction="none"),
                x.float().logsumexp(1),
            ),
        )
    )
    assert_close(out, right, 1e-5, "losses")
    assert_close(grad, wanted, {torch.bfloat16: 1e-2, torch.float32: 1e-5}.get(dtype, 1e-3), "grad")


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        *((name, {}) for name in ("auto", *runnable("softmax"))),
        *(
            (name, {"cu_seqlens": torch.tensor([0, 5, 700, 1024])})
            for name in ("auto", *runnable("softmax"))
        ),
        *((name, {"window": 300}) for name in ("auto", *with_windows("softmax"))),
    ],
)
def test_v2_on_every_runnable_backend_equals_blocked(backend, options):
    inputs = draw_v2_inputs(1024)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    out, grads = value_and_grads(
        lambda *x: diff_attention_v2(*x, backend=backend, **options), inputs
    )
    right, wanted = value_and_grads(
        lambda *x: diff_attention_v2(*x, backend="blocked", **options), exact
    )
    for name, actual, expected in zip(
        ("out", "q", "k", "v", "lambda_"), (out, *grads), (right, *wanted), strict=True
    ):
        assert_close(actual, expected, TOLERANCE[torch.bfloat16], name)


@pytest.mark.parametrize("one_pass", [False, True], ids=["split", "one pass"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_triton_with_one_map(width, dtype, one_pass):
    q, k, v, _ = draw_v2_inputs(1037, width=width, dtype=dtype)
    module, form = DIFFERENTIAL["triton"].load(), Configuration(one_pass=one_pass)
    out, grads = value_and_grads(
        lambda *x: module.attend(AttentionCall.checked(QKV.of(*x)), form), [q, k, v]
    )
    exact = [x.detach().float().requires_grad_() for x in (q, k, v)]
    right, wanted = value_and_grads(lambda *x: softmax_attention(*x, backend="blocked"), exact)
    for name, actual, expected in zip(
        ("out", "q", "k", "v"), (out, *grads), (right, *wanted), strict=True
    ):
        assert_close(actual, expected, TOLERANCE[dtype], name)


@pytest.mark.parametrize(
    ("backend", "count", "noise_heads"),
    [
        ("triton", 2, 4),
        ("triton", 2, 2),
        ("triton", 1, 4),
        ("sdpa_4call", 2, 4),
        ("sdpa_4call", 2, 2),
        ("sdpa", 1, 4),
    ],
)
def test_chunks_of_keys_add_up_to_the_whole(backend, count, noise_heads):
    """Compare output and gradients from two chunks of keys with those from all keys at once.

    The test computes what the second of two ring ranks computes. One chunk has the keys of the
    first rank, and the other chunk has the keys of the second rank.
    """
    inputs = draw_inputs(1024, keys=2048, noise_heads=noise_heads)
    q1, k1, q2, k2, v, lambda_ = (x.detach() for x in inputs)
    if count == 1:
        v, lambda_ = v[..., :128], None
    queries, all_keys = (q1, q2)[:count], (k1, k2)[:count]
    places = [
        (slice(0, 1024), {"causal": False, "query_offset": 1024, "key_offset": 0}),
        (slice(1024, 2048), {"causal": True, "query_offset": 1024, "key_offset": 1024}),
    ]
    chunks = [QKV(queries, tuple(k[:, keys] for k in all_keys), v[:, keys]) for keys, _ in places]
    parts = [
        chunk_attention(maps, backend=backend, **options)
        for maps, (_, options) in zip(chunks, places, strict=True)
    ]
    merged = [
        merge_maps(*map(list, zip(*of_map, strict=True))) for of_map in zip(*parts, strict=True)
    ]
    outs = [out for out, _ in merged]
    out = combine_maps(outs, lambda_)
    whole = WholeAttention(out, *outs[1:] or [None], tuple(lse for _, lse in merged))
    grad = torch.randn_like(out)
    found = [
        chunk_gradients(grad.to(v.dtype), maps, lambda_, whole, backend=backend, **options)
        for maps, (_, options) in zip(chunks, places, strict=True)
    ]
    exact = [x.float().requires_grad_() for x in (*queries, *all_keys, v)]
    e_queries, e_keys, e_v = exact[:count], exact[count : 2 * count], exact[-1]
    if count == 1:
        expected = softmax_attention(e_queries[0], e_keys[0], e_v, backend="blocked")
    else:
        pairs = (e_queries[0], e_keys[0], e_queries[1], e_keys[1])
        expected = diff_attention(*pairs, e_v, lambda_, backend="blocked")
    tolerance = TOLERANCE[torch.bfloat16]
    assert_close(out, expected, tolerance)
    wanted = torch.autograd.grad(expected, exact, grad.to(v.dtype).float())
    first, second = found
    actual = [a + b for a, b in zip(first.queries, second.queries, strict=True)]
    actual += [torch.cat(both, 1) for both in zip(first.keys, second.keys, strict=True)]
    actual.append(torch.cat([first.v, second.v], 1))
    for gradient, right in zip(actual, wanted, strict=True):
        assert_close(gradient, right, tolerance)


def test_triton_norm_epilogue():
    weight = torch.linspace(0.5, 1.5, 256, device="cuda", requires_grad=True)
    norm = HeadwiseNorm(weight, 1e-5, 0.3)
    assert_equals_blocked(draw_inputs(1024), lambda *x: triton(*x, norm=norm), norm=norm)


def test_split_backward_is_bit_deterministic():
    inputs = draw_inputs(4096)
    first_out, first = value_and_grads(triton, inputs)
    for _ in range(3):
        out, grads = value_and_grads(triton, inputs)
        assert torch.equal(out, first_out)
        assert all(map(torch.equal, grads, first))


def test_large_logits_stay_finite():
    inputs = draw_inputs(1000)
    scaled = [(x.detach() * 30).requires_grad_() for x in inputs[:4]]
    out, grads = value_and_grads(triton, [*scaled, *inputs[4:]])
    assert all(bool(torch.isfinite(x).all()) for x in (out, *grads))


def test_saved_activations_are_at_most_six_fifths_of_plain_attention():
    """Check that differential attention saves at most 6/5 of the bytes of plain attention.

    Differential attention saves six tensors of one size: q, k, v, out, out2 and the input of the
    output projection. Plain attention saves five, because it has no out2.
    """

    def saved_bytes(function, inputs):
        seen = {}

        def keep(x):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            heads = function(*inputs)
            keep(heads.flatten(2).transpose(0, 1).contiguous())
        return sum(seen.values())

    inputs = draw_inputs(4096, batch=2, heads=12, kv_heads=12)
    norm = HeadwiseNorm(torch.ones(256, device="cuda", requires_grad=True), 1e-5, 0.2)
    plain = [
        torch.randn(2, 4096, 24, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    mine = saved_bytes(lambda *x: triton(*x, norm=norm), inputs)
    assert mine / saved_bytes(softmax_attention, plain) <= 1.2
