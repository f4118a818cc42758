"""A recipe as the configuration of a Hugging Face model."""

import torch
from transformers import DiffLlamaConfig, LlamaConfig, PretrainedConfig

from diffmegatron.config.schema import Recipe
from diffmegatron.hf.layout import require_expressible


def to_hf_config(recipe: Recipe, end_of_document: int, dtype: torch.dtype) -> PretrainedConfig:
    """DiffLlama's configuration for the differential model, Llama's for its softmax twin.

    Args:
        recipe: the run the weights come from.
        end_of_document: token id that separated documents in training; it begins and ends text.
        dtype: of the exported weights.

    Raises:
        UserError: Hugging Face's class does not compute this model.
    """
    model = recipe.model
    require_expressible(model)
    values = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.head_dim,
        "max_position_embeddings": recipe.training.seq_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "initializer_range": model.initialization.std,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        # A padding id here becomes the embedding's padding_idx, whose row gets no gradient: who
        # fine-tunes the export could not move the end-of-document token. Generation and the
        # tokenizer have it in their own files.
        "pad_token_id": None,
        "dtype": dtype,
    }
    if model.is_differential:
        lambda_std = model.initialization.lambda_std
        values |= {"architectures": ["DiffLlamaForCausalLM"], "lambda_std_dev": lambda_std}
        return DiffLlamaConfig(**values)
    return LlamaConfig(architectures=["LlamaForCausalLM"], **values)
