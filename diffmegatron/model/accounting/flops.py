"""Model FLOPs of a network, computed from the recipe without torch."""

import math
from dataclasses import dataclass

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
    """Return the model FLOPs per token of causal training.

    Matrix products, including the output layer, need 2 FLOPs per weight and token in the forward
    pass and 4 in the backward pass. Frozen weights need only 2 in the backward pass, for the
    gradient of their input.

    The FLOPs of attention are those of its equations, computed in the cheapest way. For example,
    the maps of DIFF V1 are subtracted before the product with the values, so one product is needed
    instead of two. A query attends to half the sequence on average. The backward pass needs twice
    the FLOPs of the forward pass. Additional FLOPs of a kernel, such as those for recomputed
    scores, are not counted.

    ``frozen`` is the number of frozen weights in matrix products (:func:`frozen_matrices`).
    """
    weights: float = model.vocab_size * model.hidden_size
    attention = 0.0
    for kind, count in counted_kinds(model):
        own = kind.own_products(model.hidden_size) + lora_weights(model, kind)
        weights += count * (projection_weights(model, kind) + mlp_weights(model) + own)
        attention += 2 * (count * seq_length / 2) * kind.products()
    training = 6 * weights - 2 * frozen + 3 * attention
    return Flops(forward=2 * weights + attention, training=training)


def frozen_matrices(recipe: Recipe) -> int:
    """Return the number of elements of all frozen matrices that are used in matrix products.

    A fused matrix, such as ``linear_qkv``, is counted only if all its parts are frozen. An untied
    embedding is not counted, because a lookup is not a matrix product.
    """
    if trains_everything(recipe):
        return 0
    model = recipe.model
    looked_up = None if model.tied_embeddings else EMBEDDING
    return sum(
        math.prod(each.shape)
        for each in network_tensors(model)
        if len(each.shape) == 2 and each.name != looked_up and not trained_parts(each, recipe)
    )
