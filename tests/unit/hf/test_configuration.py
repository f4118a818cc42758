"""Tests of the keys of config.json that a recipe changes, and of configurations with mistakes."""

import pytest
from transformers import LlamaConfig

from diffmegatron.errors import UserError
from diffmegatron.hf.configuration import changed_keys, model_section
from diffmegatron.hf.modeling.configuration_mixed_diff import MixedDiffConfig
from tests.unit.hf.test_weight_mapping import make_recipe

YARN = {"kind": "yarn", "factor": 8.0, "original_length": 96}
OWN = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 8.0,
    "original_max_position_embeddings": 96,
}


@pytest.mark.parametrize("name", ["beta_fast", "attention_factor", "truncate"])
def test_a_recipe_resets_the_scaling_of_a_pretrained_model(name):
    """Check that a scaling at its defaults replaces one that a pretrained model has changed."""
    value = {"beta_fast": 64.0, "attention_factor": 1.5, "truncate": False}[name]
    sizes = {"kind": "softmax", "num_heads": 6, "num_kv_heads": 2}
    default, same = (make_recipe(**sizes, rope_scaling=YARN | each) for each in ({}, {name: value}))
    config = LlamaConfig(rope_parameters=OWN | {name: value})
    assert "rope_parameters" in changed_keys(config, default)
    assert "rope_parameters" not in changed_keys(config, same)


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "signal_per_noise": 1}
SIZES = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2, "vocab_size": 64}
ENTRY = {"layers": None, "model_type": "grouped_diff", **HEADS}


def test_every_entry_of_a_mixed_configuration_has_a_known_type():
    """Check an entry for a layer that the network does not have."""
    unknown = {"layers": "9", "model_type": "unknown"}
    with pytest.raises(ValueError, match="has model_type 'unknown'; give one of"):
        MixedDiffConfig([unknown, ENTRY], num_attention_heads=4, num_key_value_heads=4, **SIZES)


def test_a_mixed_configuration_without_a_key_is_one_sentence():
    config = MixedDiffConfig([ENTRY], num_attention_heads=4, num_key_value_heads=4, **SIZES)
    with pytest.raises(UserError, match=r"'mixed_diff' lacks '\w+'; add the key"):
        model_section(config, 0)
