"""Tests of backends that compute differential attention by calls of a library's plain attention.

FlashAttention has no CPU build, so stand-ins with the signatures of its versions and of torch's
varlen_attn call the loops of tests/kernels/loops.py. The stand-ins follow the documented
conventions of FlashAttention: the causal mask ends at the last key, rows without visible keys are
zero, and several heads may share a key-value head.
"""

import sys
from collections.abc import Iterator
from functools import cache, partial, wraps
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import _registry, current_flash_attention_impl
from torch.nn.attention import varlen as varlen_module
from torch.nn.attention.flex_attention import FlexKernelOptions, create_block_mask

from diffmegatron.attention.kernels.api import diff_attention, softmax_attention
from diffmegatron.attention.kernels.call import AttentionCall
from diffmegatron.attention.kernels.installed_backends import importable_libraries
from diffmegatron.attention.kernels.maps import QKV
from diffmegatron.attention.kernels.masks import build_mask
from diffmegatron.attention.kernels.pytorch import reference
from diffmegatron.attention.kernels.registry import DIFFERENTIAL, SOFTMAX
from diffmegatron.attention.kernels.triton.block_sizes import ChipClass
from diffmegatron.attention.kernels.wrappers import flash, flex, sdpa, varlen
from tests.kernels.loops import loop_diff_attention, make_inputs, relative_error

EIGHT_WARPS = {"fwd_num_warps": 8, "bwd_num_warps": 8}
CASES = {
    "causal": ({"rows": 9}, {}),
    "full": ({"rows": 9}, {"causal": False}),
    "gqa": ({"batch": 2, "rows": 7, "heads": 4, "kv_heads": 2}, {}),
    "grouped": ({"rows": 7, "heads": 6, "noise_heads": 2, "kv_heads": 2}, {}),
    "s < t": ({"rows": 4, "keys": 9}, {}),
    "s > t": ({"rows": 9, "keys": 4}, {}),
    "documents": ({"batch": 2, "rows": 9}, {"cu_seqlens": torch.tensor([0, 1, 5, 9])}),
}
WINDOWS = {
    "window": ({"batch": 2, "rows": 9, "heads": 4, "kv_heads": 2}, {"window": 3}),
    "window, s < t": ({"rows": 4, "keys": 9}, {"window": 5}),
    "window, documents": ({"rows": 9}, {"window": 2, "cu_seqlens": torch.tensor([0, 1, 5, 9])}),
}
OFFSETS = {
    "later keys": ({"rows": 9}, {"query_offset": 2, "key_offset": 5}),
    "document chunk": (
        {"rows": 6},
        {"cu_seqlens": torch.tensor([0, 4, 30]), "query_offset": 6, "key_offset": 3},
    ),
}


def cases_of(*backends):
    """Return parameters (backend, shape, options) of all cases that a backend supports."""
    return [
        pytest.param(name, *case, id=f"{name}, {words}")
        for name in backends
        for words, case in (CASES | WINDOWS).items()
        if words in CASES or "windows" not in (DIFFERENTIAL | SOFTMAX)[name].lacks
    ]


def assert_equals_reference(compute, inputs, options):
    call = AttentionCall.checked(QKV.of(*inputs[:5]), inputs[5], softmax_scale=0.4, **options)
    out, expected = compute(call), reference.attend(call)
    assert relative_error(out, expected) < 1e-12
    grads = torch.autograd.grad(out.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for actual, grad in zip(grads, wanted, strict=True):
        assert relative_error(actual, grad) < 1e-11


@pytest.mark.parametrize(("shape", "options"), (CASES | OFFSETS).values(), ids=CASES | OFFSETS)
def test_sdpa_4call(shape, options):
    inputs = make_inputs(**shape)
    out = diff_attention(*inputs, backend="sdpa_4call", **options)
    loop_options = dict(options)
    if (bounds := loop_options.pop("cu_seqlens", None)) is not None:
        loop_options["bounds"] = tuple(bounds.tolist())
    expected = loop_diff_attention(*inputs, **loop_options)
    assert relative_error(out, expected) < 1e-12
    grads = torch.autograd.grad(out.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for actual, grad in zip(grads, wanted, strict=True):
        assert relative_error(actual, grad) < 1e-11


@pytest.mark.parametrize(
    ("shape", "options"),
    (CASES | OFFSETS | WINDOWS).values(),
    ids=CASES | OFFSETS | WINDOWS,
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_uncompiled(shape, options):
    # FlexAttention has no backward on the CPU.
    inputs = [x.detach() for x in make_inputs(**{"width": 16, "dtype": torch.float32, **shape})]
    call = AttentionCall.checked(QKV.of(*inputs[:5]), inputs[5], softmax_scale=0.4, **options)
    assert relative_error(flex.attend(call), reference.attend(call)) < 1e-5


@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        (300, 300, {}),
        (1, 257, {}),
        (130, 700, {}),
        (700, 130, {}),
        (300, 300, {"causal": False}),
        (512, 512, {"cu_seqlens": torch.tensor([0, 1, 129, 300, 512])}),
        (512, 512, {"causal": False, "cu_seqlens": torch.tensor([0, 1, 128, 300, 512])}),
        (700, 700, {"window": 256}),
        (512, 512, {"window": 100, "cu_seqlens": torch.tensor([0, 1, 128, 300, 512])}),
        (256, 300, {"query_offset": 0, "key_offset": 60}),
        (256, 300, {"query_offset": 0, "key_offset": 600}),
        (256, 300, {"cu_seqlens": torch.tensor([0, 300, 600]), "query_offset": 300}),
    ],
)
def test_flex_block_masks_equal_torchs_create_block_mask(rows, keys, options):
    mask = build_mask(rows, keys, **options)
    start, stop = mask.key_intervals(torch.device("cpu"))

    def visible(_batch, _head, query, key):
        return (key >= start[query]) & (key < stop[query])

    found = flex.block_mask(mask, torch.device("cpu"))
    expected = create_block_mask(visible, None, None, rows, keys, device="cpu")
    assert found.shape == expected.shape
    for side in ("kv", "full_kv", "q", "full_q"):
        for table in ("num_blocks", "indices"):
            name = f"{side}_{table}"
            assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_flex_tables_built_in_inference_mode_are_normal_tensors():
    mask = build_mask(5, 77)
    cpu = torch.device("cpu")
    with torch.inference_mode():
        kept = [*mask.key_intervals(cpu), *mask.query_intervals(cpu)]
        kept.append(flex.block_mask(mask, cpu).kv_indices)
    assert not any(x.is_inference() for x in kept)


@pytest.fixture
def flex_compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Count compilations of FlexAttention with the settings for CUDA; no code is generated."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compile_for = cache(flex._flex_attention.__wrapped__)
    monkeypatch.setattr(flex, "_flex_attention", lambda _device: compile_for("cuda"))
    torch.compiler.reset()
    yield counter
    torch.compiler.reset()


def flex_attend(rows: int, width: int, ends: list[int] | None = None) -> None:
    inputs = [x.detach() for x in make_inputs(rows=rows, width=width, dtype=torch.float32)]
    documents = None if ends is None else torch.tensor([0, *ends], dtype=torch.int32)
    flex.attend(AttentionCall.checked(QKV.of(*inputs[:5]), inputs[5], cu_seqlens=documents))


def test_flex_raises_at_its_recompile_limit_instead_of_running_eagerly(
    monkeypatch, flex_compilations
):
    kinds = 3
    monkeypatch.setattr(flex, "MOST_COMPILATIONS", kinds)
    with torch._dynamo.config.patch(recompile_limit=kinds - 1):
        for width in range(1, kinds + 1):
            flex_attend(4, width)
        assert flex_compilations.frame_count == kinds
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            flex_attend(4, kinds + 1)


def test_flex_is_compiled_twice_for_any_number_of_lengths_and_documents(flex_compilations):
    """Check that FlexAttention is compiled for the first length and once more for all others.

    A sequence that fits into one block of keys needs a third compilation.
    """
    for rows in (256, 384, 300, 512):
        flex_attend(rows, 2)
    for ends in ([256], [100, 256], [1, 7, 200, 256]):
        flex_attend(256, 2, ends)
    assert flex_compilations.frame_count == 2
    flex_attend(100, 2)
    flex_attend(70, 2, [30, 70])
    assert flex_compilations.frame_count == 3


@pytest.mark.parametrize("target", ChipClass)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_flex_blocks_fit_shared_memory_and_registers_by_estimate(head_dim, dtype, target):
    """Check that prefetched blocks fit into shared memory, and accumulators into registers.

    This is an estimate, because a kernel may need more memory than that. For a size that
    `kernel_options` leaves out, the test uses the default of torch 2.13.
    """
    options = flex.kernel_options(4096, head_dim, dtype, target)
    names = {name.removeprefix("fwd_").removeprefix("bwd_") for name in options}
    assert names <= set(FlexKernelOptions.__annotations__)
    if head_dim < 128:
        assert options == ({} if head_dim < 64 or dtype == torch.float32 else EIGHT_WARPS)
        return
    sizes = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 4}
    if dtype == torch.float32:
        sizes |= {"bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16, "bwd_num_stages": 1, "bwd_num_warps": 4}
    sizes |= options
    row = 3 * head_dim * dtype.itemsize
    forward = row * sizes["fwd_BLOCK_N"] * (sizes["fwd_num_stages"] - 1)
    backward = row * (sizes["bwd_BLOCK_N1"] + sizes["bwd_BLOCK_M1"] * (sizes["bwd_num_stages"] - 1))
    limit = {ChipClass.SMALL: 99, ChipClass.LARGE: 163, ChipClass.HOPPER: 227}[target] * 1024
    assert forward <= limit
    assert backward <= limit
    # Accumulators may use at most half of the registers, which is 128 registers per thread. A warp
    # has 32 threads.
    assert sizes["fwd_BLOCK_M"] * 2 * head_dim <= 128 * 32 * sizes["fwd_num_warps"]
    assert sizes["bwd_BLOCK_N1"] * 3 * head_dim <= 128 * 32 * sizes["bwd_num_warps"]
    decoding = flex.kernel_options(1, head_dim, dtype, target)
    assert decoding == {name: x for name, x in options.items() if name.startswith("bwd_")}


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
):
    before, after = window_size
    assert after == (0 if before >= 0 else -1)
    options = {"causal": causal or after == 0, "window": before + 1 if before >= 0 else None}
    zero = torch.zeros((), dtype=q.dtype)
    return loop_diff_attention(q, k, q, k, v, zero, scale=softmax_scale, **options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    deterministic=False,
):
    bounds = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(cu_seqlens_k.diff().max())
    pieces = zip(
        *(x.split(each.diff().tolist()) for x, each in zip((q, k, v), bounds, strict=True)),
        strict=True,
    )
    options = {"softmax_scale": softmax_scale, "causal": causal, "window_size": window_size}
    return torch.cat([flash_attn_func(*(x[None] for x in piece), **options)[0] for piece in pieces])


@pytest.fixture
def stand_in(monkeypatch):
    # This call caches the list of installed libraries before the stand-in is installed, so that the
    # list does not contain the stand-in.
    importable_libraries()
    library = ModuleType("flash_stand_in")
    library.flash_attn_func = flash_attn_func
    library.flash_attn_varlen_func = flash_attn_varlen_func
    library.__version__ = "1.0.9"
    monkeypatch.setitem(sys.modules, "flash_attn", library)
    monkeypatch.setitem(sys.modules, "flex_head_fa", library)
    with_lse = ModuleType("flash_attn.cute")
    with_lse.flash_attn_func = wraps(flash_attn_func)(lambda *x, **y: (flash_attn_func(*x, **y), 0))
    with_lse.flash_attn_varlen_func = wraps(flash_attn_varlen_func)(
        lambda *x, **y: (flash_attn_varlen_func(*x, **y), None)
    )
    monkeypatch.setitem(sys.modules, "flash_attn.cute", with_lse)
    return library


def varlen_attn(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
):
    assert query.shape[-1] == value.shape[-1]
    assert enable_gqa or query.shape[1] == key.shape[1]
    bounds = cu_seq_q, cu_seq_k, max_q, max_k
    options = {"window_size": window_size}
    if window_size[0] == -1:
        options = {"causal": {-1: False, 0: True}[window_size[1]]}
    return flash_attn_varlen_func(query, key, value, *bounds, softmax_scale=scale, **options)


@pytest.fixture
def torch_flash(monkeypatch):
    """Replace torch's varlen_attn, and the kernels that its switch registers, by stand-ins."""
    handle = SimpleNamespace(remove=lambda: None)
    for name in ("FA3", "FA4"):
        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, name, lambda: handle)
    monkeypatch.setattr(varlen_module, "varlen_attn", varlen_attn)
    yield
    varlen.use_flash_attention(None)


@pytest.mark.parametrize(("backend", "shape", "options"), cases_of("varlen", "varlen_fa3"))
def test_varlen(torch_flash, monkeypatch, backend, shape, options):
    bounds = []

    def spy(query, key, value, *sequences, **others):
        bounds.extend(sequences[:2])
        return varlen_attn(query, key, value, *sequences, **others)

    monkeypatch.setattr(varlen_module, "varlen_attn", spy)
    assert_equals_reference(DIFFERENTIAL[backend].function(), make_inputs(**shape), options)
    # The four calls share the boundaries, and queries and keys do if they have the same.
    assert len(bounds) == 8 and len({id(each) for each in bounds}) == 1 + ("keys" in shape)


def test_varlen_uses_the_same_implementation_in_both_passes(torch_flash, monkeypatch):
    used = []

    def spied(attend):
        def spy(*x, **y):
            used.append(current_flash_attention_impl())
            out = attend(*x, **y)
            out.register_hook(lambda _: used.append(current_flash_attention_impl()))
            return out

        return spy

    monkeypatch.setattr(varlen_module, "varlen_attn", spied(varlen_attn))
    attend = sdpa.scaled_dot_product_attention
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spied(attend))
    q, k, _, _, v, _ = make_inputs()
    call = AttentionCall.checked(QKV.of(q, k, v[..., :4]))
    backends = ["varlen_fa3", "varlen", "varlen_fa4", "sdpa", "varlen_fa3"]
    outs = [SOFTMAX[name].function()(call) for name in backends]
    assert used == ["FA3", None, "FA4", None, "FA3"]
    used.clear()
    for out in outs:
        out.sum().backward()
    assert used == ["FA3", None, "FA4", None, "FA3"]


@pytest.mark.parametrize(
    ("backend", "shape", "options"), cases_of("flash_2call", "flash_4call", "flash4_2call")
)
def test_flash(stand_in, backend, shape, options):
    assert_equals_reference(DIFFERENTIAL[backend].function(), make_inputs(**shape), options)


@pytest.mark.parametrize(
    ("backend", "shape", "options"), cases_of("flash_attn", "flash4", "varlen_fa4", "flex")
)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_one_map_of_each_library_equals_the_reference(
    stand_in, torch_flash, backend, shape, options
):
    q, k, _, _, v, _ = (x.detach() for x in make_inputs(**{"width": 16, **shape}))
    v = v[..., :16].contiguous()
    call = AttentionCall.checked(QKV.of(q, k, v), softmax_scale=0.4, **options)
    out = SOFTMAX[backend].function()(call)
    expected = softmax_attention(q, k, v, softmax_scale=0.4, backend="reference", **options)
    assert relative_error(out, expected) < 1e-12


def test_flash_4call_splits_values_to_the_width_of_queries(stand_in):
    widths = []

    @wraps(flash_attn_func)
    def spy(q, k, v, **options):
        widths.append((q.shape[-1], v.shape[-1]))
        return flash_attn_func(q, k, v, **options)

    stand_in.flash_attn_func = spy
    assert_equals_reference(flash.attend_in_four_calls, make_inputs(width=4), {})
    assert widths == [(4, 4)] * 4
    widths.clear()
    assert_equals_reference(flash.attend_in_two_calls, make_inputs(width=4), {})
    assert widths == [(4, 8)] * 2


def test_an_old_flash_attn_is_refused_by_its_signature(stand_in):
    stand_in.flash_attn_func = lambda q, k, v, softmax_scale=None, causal=False: q
    message = (
        r"flash_attn 1\.0\.9 has no flash_attn_func with deterministic, window_size; it must be .* "
        r"2\.4"
    )
    inputs = make_inputs()
    with pytest.raises(ValueError, match=message):
        flash.attend_in_four_calls(AttentionCall.checked(QKV.of(*inputs[:5]), inputs[5]))
