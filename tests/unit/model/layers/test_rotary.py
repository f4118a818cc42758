"""The rotary embedding compared with a product of complex numbers in float64."""

import pytest
import torch

from diffmegatron.model.layers.rotary import rotate

LENGTH, BATCH, HEADS, D = 5, 2, 3, 8


def made() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries [s, b, 2, heads, d], keys [s, b, heads, d] and angles [s, 1, 1, d]."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randn(LENGTH, BATCH, *heads, D, generator=generator, dtype=torch.float64)
        for heads in ((2, HEADS), (HEADS,))
    )
    half = torch.randn(LENGTH, 1, 1, D // 2, generator=generator, dtype=torch.float64)
    return query, key, torch.cat([half, half], -1)


def turned_by_numbers(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, -1)
    angles = angles.reshape(LENGTH, *[1] * (heads.dim() - 2), D)[..., : D // 2]
    turned = torch.complex(first, second) * torch.exp(1j * angles)
    return torch.cat([turned.real, turned.imag], -1)


def test_channel_pairs_rotate_like_complex_numbers():
    query, key, angles = made()
    for heads, turned in zip((query, key), rotate(query, key, angles), strict=True):
        expected = turned_by_numbers(heads, angles)
        torch.testing.assert_close(turned, expected, rtol=0, atol=1e-14)


def test_first_and_second_derivatives_pass_gradcheck():
    query, key, angles = made()
    query.requires_grad_()
    key.requires_grad_()
    assert torch.autograd.gradcheck(lambda *heads: rotate(*heads, angles), (query, key))
    assert torch.autograd.gradgradcheck(lambda *heads: rotate(*heads, angles), (query, key))


def test_a_view_of_the_projection_is_rotated_without_changing_it():
    query, key, angles = made()
    mixed = torch.randn(LENGTH, BATCH, 2, 3 * HEADS, D, dtype=torch.float64)
    mixed[..., HEADS : 2 * HEADS, :] = query
    before = mixed.clone()
    turned, _ = rotate(mixed[..., HEADS : 2 * HEADS, :], key, angles)
    assert torch.equal(turned, rotate(query, key, angles)[0])
    assert turned.is_contiguous()
    assert torch.equal(mixed, before)


def test_only_the_angles_are_kept():
    query, key, angles = made()
    query.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        rotate(query, key, angles)
    assert [x.data_ptr() for x in kept] == [angles.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_dtype_is_kept(dtype):
    query, key, angles = made()
    exact = rotate(query, key, angles)
    tolerance = 4 * torch.finfo(dtype).eps
    rotated = rotate(query.to(dtype), key.to(dtype), angles.float())
    for turned, expected in zip(rotated, exact, strict=True):
        assert turned.dtype == dtype
        torch.testing.assert_close(turned.double(), expected, rtol=tolerance, atol=2 * tolerance)
