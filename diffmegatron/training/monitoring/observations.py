"""Values of a run for its metrics: lambda of every layer, peak memory, name of the GPU."""

import resource

import torch
from torch import distributed

from diffmegatron.model.build import lambda_by_layer
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState


def lambdas(network: Network, parallel_state: ParallelState) -> dict[str, float]:
    """Return lambda, the factor of the subtracted softmax map, of every layer; all ranks call this.

    Lambda that depends on head or token is averaged over all heads, and over this data-parallel
    rank's tokens of the last forward pass.

    Returns:
        Lambda by metric name, e.g. ``attn/lambda_layer_01`` for the first layer.
    """
    own = lambda_by_layer(network)
    if own and parallel_state.tensor_size > 1:
        means = torch.stack(list(own.values()))
        distributed.all_reduce(means, group=parallel_state.tensor_group)
        own = dict(zip(own, means / parallel_state.tensor_size, strict=True))
    mine = {layer: value.item() for layer, value in own.items()}
    stages: list[dict[int, float]] = [{} for _ in range(parallel_state.pipeline_size)]
    distributed.all_gather_object(stages, mine, group=parallel_state.pipeline_group)
    layers = {layer: value for stage in stages for layer, value in stage.items()}
    return {f"attn/lambda_layer_{layer:02d}": layers[layer] for layer in sorted(layers)}


def peak_memory() -> int:
    """Return this process's peak memory in bytes: allocated on the GPU, or resident on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name() -> str | None:
    """Return the name of this rank's GPU; None on a CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
