"""What is read off a run beside its loss: lambda of every layer, memory, use of the GPUs."""

import resource

import torch
from torch import distributed

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting import (
    count_flops,
    find_accelerator,
    frozen_matrices,
    model_flops_utilization,
)
from diffmegatron.model.build import lambda_by_layer
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState


def lambdas(network: Network, parallel_state: ParallelState) -> dict[str, float]:
    """lambda of every layer of the whole network, from the ranks of this pipeline.

    Where it depends on the token, its mean over the heads of this data-parallel rank.
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
    """Bytes: the device's peak allocation, or the process's peak resident size on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name() -> str | None:
    """What CUDA calls this rank's GPU; None on a CPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def utilization(recipe: Recipe, ranks: int, tokens_per_second: float) -> dict[str, float]:
    """``perf/mfu``: the share of the GPUs' peak that the model's FLOPs take.

    Nothing on a CPU, on a GPU whose peak is not known, or in float32, whose peak is another.

    Args:
        recipe: of the run.
        ranks: of the run, a GPU each.
        tokens_per_second: of the whole run.
    """
    name = device_name()
    accelerator = None if name is None else find_accelerator(name)
    if accelerator is None or recipe.training.precision != "bf16":
        return {}
    flops = count_flops(recipe.model, recipe.training.seq_length, frozen_matrices(recipe)).training
    return {"perf/mfu": model_flops_utilization(tokens_per_second, flops, ranks, accelerator)}
