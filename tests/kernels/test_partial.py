"""Results over chunks of keys, merged: equal to attention over all keys, gradients included."""

from itertools import pairwise

import pytest
import torch
from loops import loop_diff_attention, make_inputs, relative_error

from diffmegatron.attention.kernels import attention_with_lse, diff_attention, merge_partial

BACKENDS = ("reference", "blocked")
DOCUMENTS = torch.tensor([0, 4, 6, 30])


def chunked(q1, k1, q2, k2, v, lambda_, *, cuts, backend, **options):
    """The output from key chunks `cuts`, each computed on its own at its offset, then merged."""
    partials = []
    for start, stop in pairwise(cuts):
        k1_, k2_, v_ = (x[:, start:stop] for x in (k1, k2, v))
        _, partial = diff_attention(
            q1,
            k1_,
            q2,
            k2_,
            v_,
            lambda_,
            query_offset=k1.shape[1] - q1.shape[1],
            key_offset=start,
            return_lse=True,
            backend=backend,
            **options,
        )
        partials.append(partial)
    return merge_partial(*partials).output(lambda_)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"cu_seqlens": DOCUMENTS}, {"causal": False, "cu_seqlens": DOCUMENTS}],
    ids=["causal", "full", "causal documents", "full documents"],
)
@pytest.mark.parametrize("rows", [11, 3])
def test_merged_chunks_equal_the_whole(backend, options, rows):
    inputs = make_inputs(batch=2, rows=rows, keys=11, heads=4, kv_heads=2, width=3)
    merged = chunked(*inputs, cuts=[0, 3, 4, 11], backend=backend, **options)
    bounds = tuple(DOCUMENTS.tolist()) if "cu_seqlens" in options else ()
    causal = options.get("causal", True)
    expected = loop_diff_attention(*inputs, causal=causal, bounds=bounds)
    assert relative_error(merged, expected) < 1e-13
    grads = torch.autograd.grad(merged.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for actual, grad in zip(grads, wanted, strict=True):
        assert relative_error(actual, grad) < 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck_through_log_sum_exps_and_merge(backend):
    inputs = make_inputs(rows=4, keys=5, heads=2, kv_heads=1, width=2)

    def all_outputs(*x):
        _, partial = diff_attention(*x, return_lse=True, query_offset=1, backend=backend)
        return (chunked(*x, cuts=[0, 2, 5], backend=backend), *partial)

    assert torch.autograd.gradcheck(all_outputs, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_sum_exp_is_that_of_the_scores(backend):
    q1, k1, q2, k2, v, lambda_ = make_inputs(batch=2, rows=6, heads=2, kv_heads=2)
    out, partial = diff_attention(
        q1, k1, q2, k2, v, lambda_, causal=False, return_lse=True, backend=backend
    )
    for q, k, lse in ((q1, k1, partial.lse1), (q2, k2, partial.lse2)):
        scores = torch.einsum("bshd,bthd->bsht", q, k) / 2
        assert relative_error(lse, scores.exp().sum(-1).log()) < 1e-13
    whole = diff_attention(q1, k1, q2, k2, v, lambda_, causal=False, backend=backend)
    assert relative_error(out, whole) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_see_no_key_are_neutral_and_have_finite_gradients(backend):
    inputs = make_inputs(rows=5, keys=5)
    _, early = diff_attention(
        *inputs, key_offset=2, query_offset=0, return_lse=True, backend=backend
    )
    assert torch.equal(early.lse1[:, :2], torch.full_like(early.lse1[:, :2], -torch.inf))
    assert not early.out1[:, :2].any()
    merged = merge_partial(early, early)
    assert torch.isneginf(merged.lse2[:, :2]).all()
    for grad in torch.autograd.grad(merged.output(inputs[5]).sum(), inputs):
        assert torch.isfinite(grad).all()


def test_sixteen_bit_inputs_give_fp32_partials():
    inputs = make_inputs(rows=6, dtype=torch.bfloat16)
    out, partial = diff_attention(*inputs, return_lse=True)
    assert out.dtype == torch.bfloat16
    assert {x.dtype for x in partial} == {torch.float32}


def test_merge_refuses_nothing_and_mixed_queries():
    with pytest.raises(ValueError, match="one of each per chunk"):
        merge_partial()
    partials = [diff_attention(*make_inputs(rows=n), return_lse=True)[1] for n in (3, 4)]
    with pytest.raises(ValueError, match=r"\[1, 3, 2, 8\], \[1, 4, 2, 8\]"):
        merge_partial(*partials)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_a_merge_of_ones_own_leaves_empty_rows_without_gradient(backend):
    q, k, _, _, v, _ = make_inputs(rows=5)
    _, lse = attention_with_lse(q, k, v, query_offset=-2, backend=backend)
    assert torch.isneginf(lse[:, :2]).all()
    merged = torch.stack([lse, lse]).logsumexp(0)
    for grad in torch.autograd.grad(merged.exp().sum(), [q, k]):
        assert torch.isfinite(grad).all()
        assert grad.any()


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_log_sum_exps_are_fp32_under_autocast(backend):
    inputs = [x.detach().float() for x in make_inputs(rows=5)]
    with torch.autocast("cpu", torch.bfloat16):
        one_map = attention_with_lse(inputs[0], inputs[1], inputs[4], backend=backend)
        _, partial = diff_attention(*inputs, return_lse=True, backend=backend)
    assert {x.dtype for x in (*one_map, *partial)} == {torch.float32}
