"""Tests of the standard deviations of initial weights."""

import math

import pytest

from diffmegatron.config.tensors import NamedTensor
from diffmegatron.model.initialize import initial_tensor, initial_values

LAYER = "decoder.layers.1."


@pytest.mark.parametrize(
    ("scheme", "name", "expected"),
    [
        # The recipe has two layers. GPT-2 divides by the root of the number of residual additions.
        ("scaled", f"{LAYER}mlp.linear_fc2.weight", 0.03 / math.sqrt(4)),
        ("scaled", f"{LAYER}self_attention.linear_proj.weight", 0.03 / math.sqrt(4)),
        ("scaled", f"{LAYER}mlp.linear_fc1.weight", 0.03),
        ("scaled", f"{LAYER}self_attention.linear_qkv.weight", 0.03),
        ("normal", f"{LAYER}mlp.linear_fc2.weight", 0.03),
        ("scaled", "embedding.word_embeddings.weight", 1.0),
        # The network is four times as wide as the base.
        ("mup, base_hidden_size: 16", f"{LAYER}mlp.linear_fc2.weight", 0.03 / math.sqrt(4) / 2),
        ("mup, base_hidden_size: 16", f"{LAYER}mlp.linear_fc1.weight", 0.03 / 2),
        ("mup, base_hidden_size: 16", "output_layer.weight", 0.03),
    ],
)
def test_matrices_that_write_into_the_residual_stream_are_smaller(
    scheme, name, expected, tiny_recipe
):
    model = tiny_recipe(f"model.initialization={{scheme: {scheme}, std: 0.03}}").model
    tensor = NamedTensor(name, (400, 300), is_matrix=name.startswith(LAYER))
    assert initial_values(tensor, model) == pytest.approx(expected)
    measured = initial_tensor(tensor, model, seed=1).std().item()
    assert measured == pytest.approx(expected, rel=0.02)
