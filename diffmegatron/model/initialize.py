"""Initial weights that depend on the seed alone, never on the layout.

Every named tensor has a random stream of its own, seeded by the run's seed and its name, and is
drawn whole; each rank keeps its part. Any tensor and pipeline size thus starts from the same
network, and the twins from the same values wherever their tensors have the same name.
"""

import hashlib
import math

import torch
from torch import Tensor

from diffmegatron.attention.core import LAMBDA_VECTORS
from diffmegatron.config.schema import ModelConfig, Recipe
from diffmegatron.model.network import Network
from diffmegatron.model.shards import parameter_shards


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
    deviation = standard_deviation(name, shape, model)
    if deviation is None:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


def standard_deviation(name: str, shape: tuple[int, ...], model: ModelConfig) -> float | None:
    """The standard deviation of a named tensor's initial values; None: it starts at one."""
    initialization = model.initialization
    if name.rpartition(".")[2] in LAMBDA_VECTORS:
        return initialization.lambda_std
    if len(shape) == 1:
        return None
    if name.startswith("embedding."):
        return model.embedding_std
    writes_residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
    if writes_residual and initialization.scheme == "scaled":
        return initialization.std / math.sqrt(2 * model.num_layers)
    return initialization.std
