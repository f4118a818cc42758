"""Initial weights, which are the same for every parallel layout.

The seed of a tensor depends only on ``training.seed`` and the tensor's name.
"""

import hashlib
import math

import torch
from torch import Tensor

from diffmegatron.attention.kinds.layer import Constant, Identity
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import LORA_B, NamedTensor, network_tensors
from diffmegatron.config.trainable_patterns import is_lora
from diffmegatron.config.width_scaling import width_factors
from diffmegatron.model.network import Network, declared_parameter
from diffmegatron.model.parameter_shards import parameter_shards


@torch.no_grad()
def initialize(network: Network, recipe: Recipe) -> None:
    """Initialize every parameter of this rank in place."""
    tensors = {tensor.name: tensor for tensor in network_tensors(recipe.model)}
    for parameter, shards in parameter_shards(network).items():
        for shard in shards:
            whole = initial_tensor(tensors[shard.name], recipe.model, recipe.training.seed)
            shard.view(parameter.data).copy_(whole[shard.box])


def initial_tensor(tensor: NamedTensor, model: ModelConfig, seed: int) -> Tensor:
    """Return the initial value of an unsharded tensor, float32 on the CPU."""
    initial, shape = initial_values(tensor, model), tensor.shape
    if isinstance(initial, Constant):
        return torch.full(shape, initial.value)
    if isinstance(initial, Identity):
        return initial.scale * torch.eye(*shape)
    digest = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, initial, generator=generator)


def initial_values(tensor: NamedTensor, model: ModelConfig) -> float | Constant | Identity:
    """Return the fixed initial values of a tensor, or the standard deviation of normal ones."""
    initial, factor = _at_base_width(tensor, model), width_factors(tensor, model).initial
    if isinstance(initial, Constant):
        return Constant(initial.value * factor)
    if isinstance(initial, Identity):
        return Identity(initial.scale * factor)
    return initial * factor


def _at_base_width(tensor: NamedTensor, model: ModelConfig) -> float | Constant | Identity:
    initialization, name, shape = model.initialization, tensor.name, tensor.shape
    declared = declared_parameter(name, model)
    if declared is not None and declared.initial != "matrix":
        return declared.initial
    if len(shape) == 1:
        return Constant(1.0)
    if is_lora(name):
        # LoRA's matrix A has the standard deviation that torch gives linear layers (Kaiming uniform
        # with a = sqrt(5)).
        return Constant(0.0) if name.endswith(LORA_B) else 1 / math.sqrt(3 * shape[1])
    if name.startswith("embedding."):
        return model.embedding_std
    writes_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    if writes_residual and initialization.scheme != "normal":
        return initialization.std / math.sqrt(2 * model.num_layers)
    return initialization.std
