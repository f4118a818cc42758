"""Initial weights that depend on the seed alone, never on the layout.

Every named tensor has a random stream of its own, seeded by the run's seed and its name, and is
drawn whole; each rank keeps its part. Any tensor and pipeline size thus starts from the same
network, and a pair from the same values wherever their tensors have the same name and shape.
"""

import hashlib
import math

import torch
from torch import Tensor

from diffmegatron.attention.variants.base import Constant, Identity
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import LORA_B
from diffmegatron.config.trainable_patterns import is_lora
from diffmegatron.model.network import Network, declared_parameter
from diffmegatron.model.parameter_shards import parameter_shards


@torch.no_grad()
def initialize(network: Network, recipe: Recipe) -> None:
    """Fill every parameter of this stage."""
    for parameter, shards in parameter_shards(network).items():
        for shard in shards:
            whole = initial_tensor(
                shard.name, shard.global_shape, recipe.model, recipe.training.seed
            )
            shard.view(parameter.data).copy_(whole[shard.box])


def initial_tensor(name: str, shape: tuple[int, ...], model: ModelConfig, seed: int) -> Tensor:
    """The initial value of a whole named tensor, float32 on the CPU."""
    initial = initial_values(name, shape, model)
    if isinstance(initial, Constant):
        return torch.full(shape, initial.value)
    if isinstance(initial, Identity):
        return initial.scale * torch.eye(*shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, initial, generator=generator)


def initial_values(
    name: str, shape: tuple[int, ...], model: ModelConfig
) -> float | Constant | Identity:
    """How a named tensor starts: a float is the standard deviation of normal values."""
    initialization = model.initialization
    declared = declared_parameter(name, model)
    if declared is not None and declared.initial != "matrix":
        return declared.initial
    if len(shape) == 1:
        return Constant(1.0)
    if is_lora(name):
        # LoRA's sum starts at nothing: B is zero, and A as torch starts a linear layer's weight
        # (Kaiming with a = sqrt(5)), of that deviation.
        return Constant(0.0) if name.endswith(LORA_B) else 1 / math.sqrt(3 * shape[1])
    if name.startswith("embedding."):
        return model.embedding_std
    writes_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    if writes_residual and initialization.scheme == "scaled":
        return initialization.std / math.sqrt(2 * model.num_layers)
    return initialization.std
