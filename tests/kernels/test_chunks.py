"""Tests that attention chunk by chunk equals attention over all keys, forward and backward."""

import pytest
import torch

from diffmegatron.attention.kernels.api import (
    QKV,
    WholeAttention,
    chunk_attention,
    chunk_gradients,
    combine_maps,
    diff_attention,
    merge_maps,
)
from diffmegatron.attention.kernels.registry import Call, choose_backend
from tests.kernels.loops import loop_diff_attention, make_inputs, relative_error

DOCUMENTS = torch.tensor([0, 4, 6, 12])
# torch's flash kernels do not support document masks, so sdpa_4call has no case with documents.
CASES = [
    *((backend, None) for backend in ("reference", "blocked", "sdpa_4call")),
    *((backend, DOCUMENTS) for backend in ("reference", "blocked")),
]
CHUNK = 6


def by_chunks(inputs, maps, lambda_, grad, *, backend, cu_seqlens=None, causal=True):
    """Return (out, gradients of `inputs`), computed chunk by chunk as a ring of two ranks does."""
    outs, gradients = [], [torch.zeros_like(x) for x in inputs]
    for first_row in (0, CHUNK):
        rows = slice(first_row, first_row + CHUNK)
        visible = [start for start in (0, CHUNK) if start <= first_row or not causal]

        def meeting(start, rows=rows):
            keys = slice(start, start + CHUNK)
            part = QKV(
                tuple(q[:, rows] for q in maps.queries),
                tuple(k[:, keys] for k in maps.keys),
                maps.v[:, keys],
            )
            is_masked = cu_seqlens is not None or start == rows.start
            return part, {
                "causal": causal and is_masked,
                "query_offset": rows.start,
                "key_offset": start,
                "backend": backend,
                "cu_seqlens": cu_seqlens,
            }

        parts = [chunk_attention(part, **options) for part, options in map(meeting, visible)]
        merged = [
            merge_maps([out for out, _ in of_map], [lse for _, lse in of_map])
            for of_map in zip(*parts, strict=True)
        ]
        each = [out for out, _ in merged]
        out = combine_maps(each, lambda_)
        whole = WholeAttention(out, *each[1:] or [None], tuple(lse for _, lse in merged))
        outs.append(out)
        for start in visible:
            part, options = meeting(start)
            found = chunk_gradients(grad[:, rows], part, lambda_, whole, **options)
            keys = slice(start, start + CHUNK)
            where = [rows] * len(found.queries) + [keys] * (len(found.keys) + 1)
            for total, place, piece in zip(
                gradients, where, (*found.queries, *found.keys, found.v), strict=True
            ):
                total[:, place] += piece
    return torch.cat(outs, 1), gradients


@pytest.mark.parametrize(
    ("backend", "documents"),
    CASES,
    ids=[f"{b}{'' if d is None else ', documents'}" for b, d in CASES],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("count", "heads", "noise_heads"),
    [(1, 4, 4), (2, 4, 4), (2, 6, 2)],
    ids=["softmax", "differential", "grouped"],
)
def test_chunks_add_up_to_the_whole(backend, causal, documents, count, heads, noise_heads):
    q1, k1, q2, k2, v, lambda_ = make_inputs(
        batch=2, rows=2 * CHUNK, heads=heads, noise_heads=noise_heads, kv_heads=2, width=4
    )
    bounds = () if documents is None else tuple(documents.tolist())
    if count == 2:
        inputs = [q1, q2, k1, k2, v]
        maps = QKV((q1, q2), (k1, k2), v)
        expected = loop_diff_attention(q1, k1, q2, k2, v, lambda_, causal=causal, bounds=bounds)
    else:
        v = v[..., :4].detach().requires_grad_()
        inputs, maps, lambda_ = [q1, k1, v], QKV((q1,), (k1,), v), None
        expected = loop_diff_attention(
            q1, k1, q1, k1, v, torch.tensor(0.0), causal=causal, bounds=bounds
        )
    grad = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(5), dtype=expected.dtype
    )
    wanted = torch.autograd.grad(expected, inputs, grad)
    name = "sdpa" if (count, backend) == (1, "sdpa_4call") else backend
    out, gradients = by_chunks(
        inputs, maps, lambda_, grad, backend=name, causal=causal, cu_seqlens=documents
    )
    assert not any(x.requires_grad for x in gradients)
    assert relative_error(out, expected) < 1e-13
    for actual, right in zip(gradients, wanted, strict=True):
        assert relative_error(actual, right) < 1e-12


def chunk_of(width=4, value_width=8, dtype=torch.float32):
    q, v = torch.zeros(1, 3, 2, width, dtype=dtype), torch.zeros(1, 3, 2, value_width, dtype=dtype)
    return QKV((q, q), (q, q), v)


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_fully_masked_rows_have_zero_gradient(backend):
    q1, k1, q2, k2, v, lambda_ = make_inputs(rows=5)
    maps = QKV((q1, q2), (k1, k2), v)
    places = {"query_offset": 0, "key_offset": 2, "backend": backend}
    (out1, lse1), (out2, lse2) = chunk_attention(maps, **places)
    whole = WholeAttention(out1 - lambda_ * out2, out2, (lse1, lse2))
    found = chunk_gradients(torch.ones_like(out1), maps, lambda_, whole, **places)
    expected = diff_attention(q1, k1, q2, k2, v, lambda_, query_offset=0, key_offset=2)
    wanted = torch.autograd.grad(expected.sum(), [q1, q2, k1, k2, v])
    assert not found.queries[0][:, :2].any()
    for actual, right in zip((*found.queries, *found.keys, found.v), wanted, strict=True):
        assert relative_error(actual, right) < 1e-12


@pytest.mark.parametrize("count", [1, 2], ids=["softmax", "differential"])
def test_non_square_causal_chunks_are_not_computed_by_sdpa(count):
    """Check that torch's backends refuse non-square causal chunks and the default is right.

    torch's kernels align the causal diagonal with the first key. This project aligns it with the
    last key.
    """
    q1, k1, q2, k2, v, _ = make_inputs(rows=3, keys=7)
    maps = QKV((q1, q2)[:count], (k1, k2)[:count], v if count == 2 else v[..., : q1.shape[3]])
    with pytest.raises(ValueError, match="or a square's diagonal"):
        chunk_attention(maps, backend="sdpa" if count == 1 else "sdpa_4call")
    for (out, lse), (right, right_lse) in zip(
        chunk_attention(maps), chunk_attention(maps, backend="reference"), strict=True
    ):
        assert relative_error(out, right) < 1e-13
        assert relative_error(lse, right_lse) < 1e-13


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_log_sum_exps_are_those_of_the_scores(backend):
    q1, k1, q2, k2, v, _ = make_inputs(batch=2, rows=6, heads=2, kv_heads=2)
    parts = chunk_attention(QKV((q1, q2), (k1, k2), v), causal=False, backend=backend)
    for q, k, (_, lse) in zip((q1, q2), (k1, k2), parts, strict=True):
        scores = torch.einsum("bshd,bthd->bsht", q, k) / 2
        assert relative_error(lse, scores.exp().sum(-1).log()) < 1e-13


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_fully_masked_rows_do_not_change_a_merge(backend):
    q1, k1, q2, k2, v, _ = make_inputs(rows=5)
    options = {"query_offset": 0, "key_offset": 2, "backend": backend}
    for out, lse in chunk_attention(QKV((q1, q2), (k1, k2), v), **options):
        assert not out[:, :2].any()
        assert torch.isneginf(lse[:, :2]).all()
        merged, merged_lse = merge_maps([out, out], [lse, lse])
        assert torch.equal(merged[:, :2], out[:, :2])
        assert torch.isneginf(merged_lse[:, :2]).all()
        assert relative_error(merged, out) < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["reference", "blocked", "sdpa_4call"])
def test_autocast_changes_nothing(backend, dtype):
    q1, k1, q2, k2, v, lambda_ = (x.detach().to(dtype) for x in make_inputs(rows=6))
    maps = QKV((q1, q2), (k1, k2), v)

    def both():
        (out1, lse1), (out2, lse2) = chunk_attention(maps, backend=backend)
        whole = WholeAttention(out1 - lambda_ * out2, out2, (lse1, lse2))
        grad = torch.ones_like(out1)
        found = chunk_gradients(grad, maps, lambda_, whole, backend=backend)
        return [out1, lse1, *found.queries, *found.keys, found.v]

    expected = both()
    with torch.autocast("cpu", torch.float16):
        actual = both()
    for with_autocast, without in zip(actual, expected, strict=True):
        assert torch.equal(with_autocast, without)
        assert with_autocast.dtype == without.dtype


def test_chunk_attention_refuses_unsupported_masks_and_wrong_shapes():
    with pytest.raises(ValueError, match="cannot attend chunk by chunk with masks other than none"):
        chunk_attention(chunk_of(), backend="sdpa_4call", cu_seqlens=torch.tensor([0, 2, 3]))
    with pytest.raises(ValueError, match=r"v has shape \[1, 3, 2, 4\]"):
        chunk_attention(chunk_of(value_width=4))


def test_chunk_gradients_refuses_missing_lambda_and_wrong_shapes():
    maps, lambda_ = chunk_of(), torch.tensor(0.5)
    out, lse = torch.zeros(1, 3, 2, 8), torch.zeros(1, 3, 2)
    whole = WholeAttention(out, out, (lse, lse))
    with pytest.raises(
        ValueError, match=r"lambda_ is None and whole\.out2 is not None with 2 maps"
    ):
        chunk_gradients(out, maps, None, whole)
    with pytest.raises(ValueError, match=r"grad has shape \[1, 3, 2, 4\].* must be \[1, 3, 2, 8\]"):
        chunk_gradients(out[..., :4], maps, lambda_, whole)
    with pytest.raises(ValueError, match=r"whole.lses\[0\] has shape \[1, 2, 3\]"):
        swapped = lse.transpose(1, 2)
        chunk_gradients(out, maps, lambda_, WholeAttention(out, out, (swapped, swapped)))
    with pytest.raises(ValueError, match="maps has 2 queries and 1 keys"):
        chunk_attention(QKV(maps.queries, maps.keys[:1], maps.v))


def test_chunk_outputs_of_bf16_inputs_are_fp32():
    q1, k1, q2, k2, v, _ = make_inputs(rows=6, dtype=torch.bfloat16)
    parts = chunk_attention(QKV((q1, q2), (k1, k2), v))
    assert {x.dtype for part in parts for x in part} == {torch.float32}


def test_auto_selects_sdpa_for_chunks_on_cuda_in_bf16_but_not_fp32():
    needs, nothing = frozenset({"chunks"}), frozenset()
    call = Call("differential", "cuda", "bfloat16", 128, needs)
    assert choose_backend("auto", call, nothing)[0] == "sdpa_4call"
    name, reason = choose_backend("auto", call._replace(dtype="float32"), nothing)
    assert name == "blocked"
    assert "takes bfloat16, float16 chunk by chunk on cuda, got float32" in reason


def test_auto_selects_sdpa_for_one_map_unless_chunks_are_masked():
    needs, nothing = frozenset({"chunks"}), frozenset()
    call = Call("softmax", "cpu", "float32", 64, needs)
    assert choose_backend("auto", call, nothing)[0] == "sdpa"
    in_documents = needs | {"documents", "offsets", "masked chunks"}
    call = Call("softmax", "cuda", "bfloat16", 64, in_documents)
    assert choose_backend("auto", call, nothing)[0] == "blocked"
