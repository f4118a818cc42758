"""Tests that kernels without a second derivative raise an error if it is requested.

Their first derivative is right, also with ``create_graph=True``.
"""

import pytest
import torch

from diffmegatron.attention.kernels.api import diff_attention, softmax_attention
from tests.kernels.loops import make_inputs, relative_error


def loss_of(inputs, backend):
    out = diff_attention(*inputs, backend=backend)
    return out.square().sum() + inputs[0].pow(3).sum()


def test_the_first_derivative_with_create_graph_is_right():
    inputs = make_inputs(rows=5)
    found = torch.autograd.grad(loss_of(inputs, "blocked"), inputs, create_graph=True)
    wanted = torch.autograd.grad(loss_of(inputs, "reference"), inputs)
    for actual, right in zip(found, wanted, strict=True):
        assert relative_error(actual, right) < 1e-12


@pytest.mark.parametrize("towards", range(6), ids=["q1", "k1", "q2", "k2", "v", "lambda"])
def test_a_second_derivative_is_refused_towards_every_input(towards):
    inputs = make_inputs(rows=5)
    grads = torch.autograd.grad(loss_of(inputs, "blocked"), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative; backend='reference' has one"):
        torch.autograd.grad(grads[0].square().sum(), inputs[towards])


def test_a_second_derivative_is_refused_with_a_constant_incoming_gradient():
    inputs = make_inputs(rows=5)
    out = diff_attention(*inputs, backend="blocked")
    (grad,) = torch.autograd.grad(out.sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        (grad.square().sum() + inputs[0].sum()).backward()


def test_softmax_attention_refuses_a_second_derivative():
    q, k, _, _, v, _ = make_inputs(rows=5)
    out = softmax_attention(q, k, v[..., :4], backend="blocked")
    (grad,) = torch.autograd.grad(out.square().sum(), [k], create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), q)


def test_the_reference_has_a_second_derivative():
    inputs = make_inputs(rows=5)
    grads = torch.autograd.grad(loss_of(inputs, "reference"), inputs, create_graph=True)
    (second,) = torch.autograd.grad(grads[0].square().sum(), inputs[1])
    assert second.any()
