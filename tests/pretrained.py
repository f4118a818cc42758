"""Tiny random models of every family that can be imported, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from diffmegatron.config.model_config import ModelConfig
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.hf.modeling import register
from diffmegatron.hf.tokenizer import write_tokenizer
from diffmegatron.hf.weight_mapping import table

SIZES = {
    "vocab_size": 264,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 256,
    "initializer_range": 0.1,
}
TIED = {"tie_word_embeddings": True}
# The wavelengths are so small that all three frequency ranges of llama3 affect a line of text.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Of four channels, the first is kept, the last is divided and two are blended. Null stands for the
# default in transformers.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.0,
    "beta_slow": 0.25,
    "attention_factor": None,
    "mscale": 1.0,
}
# The first layer sees all tokens, and the others have a window.
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama 2": {"model_type": "llama", "num_key_value_heads": 6, "rms_norm_eps": 1e-6},
    "llama 3.2": {"model_type": "llama", "rope_parameters": LLAMA3, **TIED},
    "llama, linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
    },
    "llama, yarn": {"model_type": "llama", "rope_parameters": YARN},
    # The hidden size is not a multiple of the number of heads.
    "mistral": {
        "model_type": "mistral",
        "sliding_window": None,
        "num_attention_heads": 10,
        "head_dim": 8,
    },
    "mistral, windows": {"model_type": "mistral", "sliding_window": 9},
    "qwen2": {"model_type": "qwen2", **TIED},
    "qwen2, windows": {"model_type": "qwen2", **WINDOWS},
    "qwen2.5": {"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6}},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "qwen3, windows": {"model_type": "qwen3", "num_hidden_layers": 4, **WINDOWS},
    "gated_llama": {"model_type": "gated_llama", "qk_norm": True},
    "seed_oss": {
        "model_type": "seed_oss",
        "head_dim": 10,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    },
    "smollm2": {
        "model_type": "llama",
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        **TIED,
    },
    "diffllama": {"model_type": "diffllama"},
    "diff_v2": {
        "model_type": "diff_v2",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 9,
        "signal_per_noise": 2,
        "head_dim": 8,
        "qk_norm": True,
        "output_gate": "elementwise",
    },
    "grouped": {
        "model_type": "grouped_diff",
        "signal_per_noise": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
    },
    "grouped, its own lambda": {
        "model_type": "grouped_diff",
        "signal_per_noise": 2,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "lambda_init": 0.7,
        "qk_norm": True,
        "output_gate": "headwise",
        "headwise_norm": False,
    },
}


def write_pretrained(
    folder: Path,
    family: str,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    **changes: object,
) -> Path:
    """Write a random model of a family into a new folder, and return the folder.

    No bias is 0 and no norm weight is 1, so that a test detects a wrong bias or norm weight.
    """
    register()
    folder.mkdir()
    # Write the tokenizer before config.json. The check in write_tokenizer would otherwise read
    # config.json, whose model_type selects a tokenizer class that normalizes text.
    write_tokenizer(load_tokenizer("bytes"), 64, folder)
    values = {"rope_parameters": {"rope_theta": 700.0}} | SIZES | FAMILIES[family] | changes
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(parameter + 0.3 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def random_weights(model: ModelConfig) -> dict[str, Tensor]:
    """Return random weights for any kind of attention; no bias is 0 and no norm weight is 1."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in (line for rule in table(model) for line in rule.ours.items()):
        random = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            weights[name] = random * 1.5 / shape[1] ** 0.5
        else:
            is_norm = "norm" in name
            weights[name] = 0.3 * random + is_norm
    return weights
