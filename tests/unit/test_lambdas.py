"""lambda and its initial value against the paper's numbers and a float64 computation."""

import math

import pytest
import torch

from diffmegatron.attention.lambdas import differential_lambda, lambda_init
from diffmegatron.config.schema import LambdaInit


def test_initial_value_rises_from_a_fifth_to_four_fifths():
    policy = LambdaInit()
    assert lambda_init(policy, 1) == pytest.approx(0.2)
    assert lambda_init(policy, 2) == pytest.approx(0.8 - 0.6 * math.exp(-0.3))
    assert lambda_init(policy, 28) == pytest.approx(0.8, abs=2e-4)


def test_constant_policy_ignores_the_layer():
    policy = LambdaInit(policy="constant", value=0.5)
    assert {lambda_init(policy, layer) for layer in (1, 5, 28)} == {0.5}


def test_lambda_is_exact_and_float32_for_any_vectors():
    vectors = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) * 0.1
    q1, k1, q2, k2 = vectors.double()
    expected = math.exp(q1 @ k1) - math.exp(q2 @ k2) + 0.35
    value = differential_lambda(*vectors, 0.35)
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.item() == pytest.approx(expected, abs=1e-6)


def test_swapping_the_pairs_changes_the_sign_of_the_learnt_part():
    q1, k1, q2, k2 = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    there = differential_lambda(q1, k1, q2, k2, 0.2) - 0.2
    back = differential_lambda(q2, k2, q1, k1, 0.2) - 0.2
    assert there.item() == pytest.approx(-back.item(), rel=1e-5)
    assert abs(there.item()) > 0.1
