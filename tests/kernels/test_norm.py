"""Tests of the option `norm`, the headwise RMSNorm, on backends that do not fuse the norm."""

import pytest
import torch

from diffmegatron.attention.kernels.api import HeadwiseNorm, diff_attention
from tests.kernels.loops import loop_diff_attention, make_inputs, relative_error


@pytest.mark.parametrize("has_weight", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_norm_is_rms_norm_of_each_head_times_weight_and_scale(backend, has_weight):
    inputs = make_inputs(heads=4, kv_heads=2)
    weight = torch.linspace(0.5, 2.0, 8, dtype=torch.float64) if has_weight else None
    out = diff_attention(*inputs, backend=backend, norm=HeadwiseNorm(weight, 1e-3, 0.4))
    for head, normed in zip(
        loop_diff_attention(*inputs).flatten(0, 2), out.flatten(0, 2), strict=True
    ):
        unit = head / (head.square().sum() / 8 + 1e-3).sqrt()
        assert relative_error(normed, 0.4 * unit * (1.0 if weight is None else weight)) < 1e-13


def test_norm_keeps_sixteen_bits_but_computes_in_fp32():
    inputs = make_inputs(dtype=torch.bfloat16)
    out = diff_attention(*inputs, norm=HeadwiseNorm(torch.ones(8), 1e-5, 1.0))
    plain = diff_attention(*inputs).float()
    expected = plain * torch.rsqrt(plain.square().mean(-1, keepdim=True) + 1e-5)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, expected.bfloat16())


def test_norm_weight_of_a_wrong_width_is_refused():
    with pytest.raises(ValueError, match=r"norm.weight has shape \[4\] .* must be \[8\]"):
        diff_attention(*make_inputs(), norm=HeadwiseNorm(torch.ones(4), 1e-5, 1.0))
