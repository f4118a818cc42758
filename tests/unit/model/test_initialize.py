"""Tests of the standard deviations of initial weights."""

import math

import pytest

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
    ],
)
def test_matrices_that_write_into_the_residual_stream_are_smaller(
    scheme, name, expected, tiny_recipe
):
    model = tiny_recipe(f"model.initialization={{scheme: {scheme}, std: 0.03}}").model
    assert initial_values(name, (400, 300), model) == pytest.approx(expected)
    measured = initial_tensor(name, (400, 300), model, seed=1).std().item()
    assert measured == pytest.approx(expected, rel=0.02)
