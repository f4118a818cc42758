"""Model FLOPs of a network, as in PaLM (arXiv 2204.02311, appendix B)."""

import math
from dataclasses import dataclass

from diffmegatron.attention.costs import costs_of
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import EMBEDDING, network_tensors
from diffmegatron.config.trainable_patterns import trained_parts, trains_everything
from diffmegatron.model.accounting.parameters import (
    counted_kinds,
    lora_weights,
    mlp_weights,
    projection_weights,
)


@dataclass(frozen=True)
class Flops:
    """Model FLOPs per token; ``training`` is the sum of the forward and the backward pass."""

    forward: float
    training: float


def count_flops(model: ModelConfig, seq_length: int, frozen: int = 0) -> Flops:
    """Return the model FLOPs per token of causal training, without recomputation.

    Attention counts the smallest number of multiply-adds that can compute its equation, even if the
    kernels do more. Without a window, a query attends to half the sequence on average. ``frozen``
    is the result of :func:`frozen_matrices`.
    """
    weights: float = model.vocab_size * model.hidden_size
    attention = 0.0
    for kind, count in counted_kinds(model):
        own = costs_of(kind).own_products(model.hidden_size) + lora_weights(model, kind)
        weights += count * (projection_weights(model, kind) + mlp_weights(model) + own)
        costs = costs_of(kind)
        attention += 2 * (count * costs.visible_keys(seq_length)) * costs.products()
    training = 6 * weights - 2 * frozen + 3 * attention
    return Flops(forward=2 * weights + attention, training=training)


def frozen_matrices(recipe: Recipe) -> int:
    """Return the number of elements of all fully frozen matrices, except an untied embedding."""
    if trains_everything(recipe):
        return 0
    model = recipe.model
    looked_up = None if model.tied_embeddings else EMBEDDING
    return sum(
        math.prod(each.shape)
        for each in network_tensors(model)
        if len(each.shape) == 2 and each.name != looked_up and not trained_parts(each, recipe)
    )
