"""lambda and its initial value, compared with the paper's numbers and a float64 computation."""

import math
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from diffmegatron.attention.kinds.diff_v1 import DiffV1
from diffmegatron.attention.kinds.grouped import Grouped
from diffmegatron.attention.kinds.lambda_init import LambdaInit
from diffmegatron.attention.kinds.two_maps import LAMBDA_VECTORS
from diffmegatron.model.network import _lambdas

CONSTANT = LambdaInit(policy="constant", value=0.35)


class Layer:
    """Fake layer with the attributes that a kind uses: its number and four lambda vectors."""

    def __init__(self, *vectors: Tensor, layer_number: int = 1) -> None:
        self.layer_number = layer_number
        self._vectors = dict(zip(LAMBDA_VECTORS, vectors, strict=True))

    def parameter(self, name: str) -> Tensor:
        return self._vectors[name]


def test_initial_value_rises_from_a_fifth_to_four_fifths():
    policy = LambdaInit()
    assert policy.of_layer(1) == pytest.approx(0.2)
    assert policy.of_layer(2) == pytest.approx(0.8 - 0.6 * math.exp(-0.3))
    assert policy.of_layer(28) == pytest.approx(0.8, abs=2e-4)


def test_constant_policy_ignores_the_layer():
    policy = LambdaInit(policy="constant", value=0.5)
    assert {policy.of_layer(layer) for layer in (1, 5, 28)} == {0.5}


@pytest.mark.parametrize("kind", [DiffV1, Grouped])
def test_lambda_is_exact_and_float32_for_any_vectors(kind: type[DiffV1]):
    vectors = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)) * 0.1
    q1, k1, q2, k2 = vectors.double()
    expected = math.exp(q1 @ k1) - math.exp(q2 @ k2) + 0.35
    value = kind(lambda_init=CONSTANT).current_lambda(Layer(*vectors))
    assert value.dtype == torch.float32
    assert value.shape == ()
    assert value.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("number", [1, 2, 28])
def test_lambda_of_zero_vectors_is_the_initial_value_of_the_layer(number: int):
    layer = Layer(*torch.zeros(4, 8), layer_number=number)
    expected = 0.8 - 0.6 * math.exp(-0.3 * (number - 1))
    assert DiffV1().current_lambda(layer).item() == pytest.approx(expected)


def test_swapping_the_pairs_changes_the_sign_of_the_learned_part():
    q1, k1, q2, k2 = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
    kind = DiffV1(lambda_init=CONSTANT)
    there = kind.current_lambda(Layer(q1, k1, q2, k2)) - 0.35
    back = kind.current_lambda(Layer(q2, k2, q1, k1)) - 0.35
    assert there.item() == pytest.approx(-back.item(), rel=1e-5)
    assert abs(there.item()) > 0.1


def test_the_lambdas_of_a_stage_are_computed_in_the_order_of_its_layers():
    """All ranks need one order, because their backward passes sum gradients in its reverse."""
    computed = []

    def computing(number: int) -> Mock:
        def current_lambdas(kinds_and_layers: list) -> None:
            computed.append(number)

        kind = type(f"Kind{number}", (), {"current_lambdas": staticmethod(current_lambdas)})
        return Mock(kind=kind(), parameters=lambda recurse: [])

    layers = [computing(number) for number in range(8)]
    _lambdas([*layers, layers[0]])
    assert computed == list(range(8))
