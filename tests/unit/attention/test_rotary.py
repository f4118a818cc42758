"""The rotary embedding as a product of complex numbers, in float64."""

import pytest
import torch

from diffmegatron.attention.rotary import rotate

LENGTH, BATCH, HEADS, D = 5, 2, 3, 8


def made() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(LENGTH, BATCH, HEADS, D, generator=generator, dtype=torch.float64)
    half = torch.randn(LENGTH, 1, 1, D // 2, generator=generator, dtype=torch.float64)
    return heads, torch.cat([half, half], -1)


def test_channels_turn_in_the_plane_of_their_pair():
    heads, angles = made()
    first, second = heads.chunk(2, -1)
    turned = torch.complex(first, second) * torch.exp(1j * angles[..., : D // 2])
    expected = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotate(heads, angles), expected, rtol=0, atol=1e-14)


def test_gradients_are_those_of_the_function():
    heads, angles = made()
    heads.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, angles), (heads,))
    assert torch.autograd.gradgradcheck(lambda x: rotate(x, angles), (heads,))


def test_a_view_of_the_projection_is_read_and_left_as_it_is():
    heads, angles = made()
    mixed = torch.randn(LENGTH, BATCH, HEADS, 3 * D, dtype=torch.float64)
    mixed[..., D : 2 * D] = heads
    before = mixed.clone()
    assert torch.equal(rotate(mixed[..., D : 2 * D], angles), rotate(heads, angles))
    assert torch.equal(mixed, before)


def test_only_the_angles_are_kept():
    heads, angles = made()
    heads.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        rotate(heads, angles)
    assert [x.data_ptr() for x in kept] == [angles.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_is_kept(dtype):
    heads, angles = made()
    turned = rotate(heads.to(dtype), angles.float())
    assert turned.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        turned.double(), rotate(heads, angles), rtol=tolerance, atol=2 * tolerance
    )
