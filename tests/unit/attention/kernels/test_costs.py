"""Costs of the attention backends.

Saved bytes are compared with the bytes that autograd saves, and work is compared with the papers'
multiply-adds.
"""

import pytest
import torch

from diffmegatron.attention.kernels.api import (
    diff_attention,
    diff_attention_v2,
    softmax_attention,
    subtract_noise,
)
from diffmegatron.attention.kernels.costs import Sizes, ring_saved, triton_work
from diffmegatron.attention.kernels.registry import DIFFERENTIAL, SOFTMAX

D, KEYS = 8, 64


def saved_bytes(function, *inputs):
    """Return the bytes per query that autograd saves, and whether autograd saves the result.

    The bytes do not include the inputs and the result.
    """
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = function(*inputs)
    given = {x.untyped_storage().data_ptr() for x in inputs}
    own = result.untyped_storage().data_ptr()
    beside = sum(size for where, size in kept.items() if where not in {own, *given})
    return beside / result.shape[1], own in kept


def draw(*shape, dtype):
    return torch.randn(1, KEYS, *shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noise_heads", [4, 2])
@pytest.mark.parametrize("backend", ["blocked", "sdpa_4call"])
def test_saved_bytes_of_two_maps_are_those_that_autograd_keeps(backend, noise_heads, dtype):
    heads, queries, keys = 4, (noise_heads, D), (2, D)
    q1, k1, q2, k2 = (draw(*x, dtype=dtype) for x in ((heads, D), keys, queries, keys))
    inputs = (q1, k1, q2, k2, draw(2, 2 * D, dtype=dtype), torch.tensor(0.5, requires_grad=True))
    found, saves_result = saved_bytes(lambda *x: diff_attention(*x, backend=backend), *inputs)
    row = DIFFERENTIAL[backend]
    sizes = Sizes(dtype.itemsize, D, heads, noise_heads, kv_heads=2, keys=KEYS)
    # The tolerance of 8 bytes per call covers a copy of lambda in the dtype of the product, which
    # autograd saves once per call and not once per query.
    assert found == pytest.approx(row.saved(sizes), abs=8 / KEYS)
    assert saves_result == row.saves_result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["blocked", "sdpa"])
def test_saved_bytes_of_one_map_are_those_that_autograd_keeps(backend, dtype):
    inputs = (draw(4, D, dtype=dtype), draw(2, D, dtype=dtype), draw(2, D, dtype=dtype))
    found, saves_result = saved_bytes(lambda *x: softmax_attention(*x, backend=backend), *inputs)
    row = SOFTMAX[backend]
    assert found == row.saved(Sizes(dtype.itemsize, D, 4, 0, kv_heads=2, keys=KEYS))
    assert saves_result == row.saves_result


@pytest.mark.parametrize("noise_heads", [0, 2, 4])
def test_the_reference_keeps_whole_maps(noise_heads):
    """Check that the reference backend saves the counted bytes, which include whole maps.

    It also saves a few bytes that are not counted: one copy of k and v per key-value head, and one
    byte per query and map. The test allows more additional bytes: two masks of one byte per pair of
    a query and a key, and a copy of k and v for every query head.
    """
    keys, element = 512, 4
    widths = [(4, D), (2, D), (noise_heads, D), (2, D), (2, 2 * D)] if noise_heads else None
    shapes = widths or [(4, D), (2, D), (2, D)]
    inputs = [torch.randn(1, keys, *shape, requires_grad=True) for shape in shapes]
    if noise_heads:
        inputs.append(torch.tensor(0.5, requires_grad=True))
        attend, table = diff_attention, DIFFERENTIAL
    else:
        attend, table = softmax_attention, SOFTMAX
    found, _ = saved_bytes(lambda *x: attend(*x, backend="reference"), *inputs)
    sizes = Sizes(element, D, 4, noise_heads, kv_heads=2, keys=keys)
    masks, copies = 2 * (keys + 2), 2 * element * 2 * D * 4
    assert 0 <= found - table["reference"].saved(sizes) <= masks + copies


def test_v2_keeps_its_heads_and_lambda_once():
    q, k, v = (draw(heads, D, dtype=torch.bfloat16) for heads in (6, 2, 2))
    lambda_ = torch.rand(1, KEYS, 4, requires_grad=True)
    found, saves_result = saved_bytes(diff_attention_v2, q, k, v, lambda_)
    one_map = SOFTMAX["sdpa"].saved(Sizes(2, D, 6, 0, kv_heads=2, keys=KEYS))
    assert found == one_map + 2 * 6 * D
    assert not saves_result
    assert saved_bytes(subtract_noise, q, lambda_) == (0, False)


VARLEN = ("varlen", "varlen_fa3", "varlen_fa4")


def per_head(row, noise_heads, heads=12, d=64):
    """Return forward and backward multiply-adds per query-key pair and signal head, divided by d.

    Args:
        row: backend, a row of the registry.
        noise_heads: number of noise heads; 0 in softmax attention.
        heads: number of signal heads.
        d: head dimension.
    """
    return tuple(x / (d * heads) for x in row.work(Sizes(2, d, heads, noise_heads, heads, 1)))


def test_work_per_pair_is_that_of_the_papers():
    counts = {
        "reference": (4, 8),
        "blocked": (4, 10),
        "triton": (6, 10),
        "flash_2call": (6, 14),
        "flash_4call": (8, 20),
        "cudnn_2call": (6, 14),
        "sdpa_4call": (8, 20),
        "flash4_2call": (6, 14),
        "flex": (6, 14),
        **dict.fromkeys(VARLEN, (8, 20)),
    }
    assert {name: per_head(row, 12) for name, row in DIFFERENTIAL.items()} == counts
    sizes = Sizes(2, 128, 12, 12, 12, 1)
    assert DIFFERENTIAL["triton"].work(sizes) == (6 * 128 * 12, 14 * 128 * 12)
    assert triton_work(sizes, one_pass=True) == (6 * 128 * 12, 10 * 128 * 12)
    # To compare these counts with those of differential attention, double them: two heads of
    # softmax attention are as wide as one differential head.
    assert {name: per_head(row, 0) for name, row in SOFTMAX.items()} == {
        "reference": (2, 4),
        **dict.fromkeys(("blocked", "triton", "sdpa", "flash_attn", "flash4", "flex"), (2, 5)),
        **dict.fromkeys(VARLEN, (2, 5)),
    }


def test_a_shared_noise_head_is_computed_once():
    """Check that 4 signal heads with one shared noise head need a quarter of the noise scores.

    Backends that multiply each map by the values separately also need only a quarter of the
    products of noise maps and values.
    """
    assert per_head(DIFFERENTIAL["blocked"], 3) == (3 + 1 / 4, 7 + 3 / 4)
    assert per_head(DIFFERENTIAL["flash_2call"], 3) == (3 + 3 / 4, 7 + 7 / 4)
    assert per_head(DIFFERENTIAL["triton"], 3) == (3 + 3 / 4, 7 + 7 / 4)


def test_a_ring_keeps_the_second_output_and_a_log_sum_exp_per_map():
    assert ring_saved(Sizes(2, 128, 12, 3, 3, 1)) == 2 * 256 * 3 + 4 * 15
    assert ring_saved(Sizes(2, 128, 30, 0, 3, 1)) == 4 * 30
