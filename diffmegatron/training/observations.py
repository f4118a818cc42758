"""What is read off a run beside its loss: lambda of every layer, memory."""

import resource

import torch
from torch import distributed

from diffmegatron.model.build import lambda_by_layer
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import Topology


def lambdas(network: Network, topology: Topology) -> dict[str, float]:
    """lambda of every layer of the whole network, from the ranks of this pipeline.

    Where it depends on the token, its mean over the heads of this data-parallel rank.
    """
    own = lambda_by_layer(network)
    if own and topology.tensor_size > 1:
        means = torch.stack(list(own.values()))
        distributed.all_reduce(means, group=topology.tensor_group)
        own = dict(zip(own, means / topology.tensor_size, strict=True))
    mine = {layer: value.item() for layer, value in own.items()}
    stages: list[dict[int, float]] = [{} for _ in range(topology.pipeline_size)]
    distributed.all_gather_object(stages, mine, group=topology.pipeline_group)
    layers = {layer: value for stage in stages for layer, value in stage.items()}
    return {f"attn/lambda_layer_{layer:02d}": layers[layer] for layer in sorted(layers)}


def peak_memory() -> int:
    """Bytes: the device's peak allocation, or the process's peak resident size on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
