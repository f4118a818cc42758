"""Values of a run for its metrics: lambda of every layer, peak memory, name of the GPU.

Lambda is the factor of the noise map, the softmax map that differential attention subtracts.
"""

import resource

import torch
from torch import distributed

from diffmegatron.model.build import lambda_by_layer
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState


def lambdas(network: Network, parallel_state: ParallelState) -> dict[str, float]:
    """Return lambda of every layer of the network as metrics. All ranks must call this function.

    If lambda depends on the head and the token, the value of a layer is a mean. The mean is over
    all heads, and over the tokens that this data-parallel rank processed in the last forward pass.

    Returns:
        Lambda by metric name ``attn/lambda_layer_XX``, where XX is the layer's number (01 is the
        first layer). Layers of softmax attention have no entry.
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
    """Return the name of this rank's GPU as CUDA reports it; None on a CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
