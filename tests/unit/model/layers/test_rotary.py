"""Rotation compared with complex numbers in float64, and frequencies with those of transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diffmegatron.config.model_config import RopeScaling
from diffmegatron.model.layers.rotary import rotate, scaled_frequencies

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


def test_rotated_heads_are_multiplied_by_the_scale():
    query, key, angles = made()
    for heads, turned in zip((query, key), rotate(query, key, angles, 1.3), strict=True):
        expected = 1.3 * turned_by_numbers(heads, angles)
        torch.testing.assert_close(turned, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_first_and_second_derivatives_pass_gradcheck(scale):
    query, key, angles = made()
    query.requires_grad_()
    key.requires_grad_()
    assert torch.autograd.gradcheck(lambda *heads: rotate(*heads, angles, scale), (query, key))
    assert torch.autograd.gradgradcheck(lambda *heads: rotate(*heads, angles, scale), (query, key))


# The last set has no channel between kept and divided ones.
YARN = {"factor": 16.0, "original_length": 4096}
SCALINGS = {
    "paper": YARN,
    "betas": YARN | {"beta_fast": 40.0, "beta_slow": 2.5},
    "attention factor": YARN | {"attention_factor": 1.1},
    "mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 0.4},
    "not truncated": {"factor": 32.0, "original_length": 4096, "truncate": False},
    "short": {"factor": 4.0, "original_length": 3},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "width"), [(1e4, 128), (640000.0, 64), (700.0, 8)])
def test_yarn_equals_transformers_to_the_bit(name, theta, width):
    scaling = RopeScaling(kind="yarn", **SCALINGS[name])
    described = SCALINGS[name] | {"rope_type": "yarn", "rope_theta": theta}
    described["original_max_position_embeddings"] = described.pop("original_length")
    config = LlamaConfig(head_dim=width, rope_parameters=described)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    channels = torch.arange(0, width, 2, dtype=torch.float32)
    found = scaled_frequencies(1.0 / (theta ** (channels / width)), scaling, theta)
    assert torch.equal(found, expected)
    assert scaling.rotation_scale == factor


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
