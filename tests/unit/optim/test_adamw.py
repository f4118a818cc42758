"""Tests of which tensors AdamW decays."""

import pytest
import torch

from diffmegatron.optim.adamw import _decays

LAYER = "decoder.layers.0.self_attention."


@pytest.mark.parametrize("setting", [False, True])
@pytest.mark.parametrize(
    ("kind", "name", "dimensions", "expected"),
    [
        ("diff_v1", "embedding.word_embeddings.weight", 2, "decay_embeddings"),
        ("diff_v1", f"{LAYER}lambda_q1", 1, "decay_lambda"),
        ("diff_v1", f"{LAYER}head_norm", 1, False),
        ("diff_v1", f"{LAYER}linear_qkv.weight", 2, True),
        ("diff_v1", "decoder.final_layernorm.weight", 1, False),
        ("diff_v2", f"{LAYER}lambda_proj", 2, True),
        ("softmax", f"{LAYER}linear_qkv.bias", 1, False),
    ],
)
def test_matrices_decay_and_other_tensors_only_on_request(
    kind, name, dimensions, expected, setting, tiny_recipe
):
    overrides = [f"model.attention.kind={kind}"]
    overrides += [f"optimizer.{key}={setting}" for key in ("decay_embeddings", "decay_lambda")]
    bias = ["model.attention.qkv_bias=true"] if "bias" in name else []
    recipe = tiny_recipe(*overrides, *bias)
    tensor = torch.empty((2,) * dimensions)
    assert _decays(name, tensor, recipe) == (setting if isinstance(expected, str) else expected)
