"""Model FLOPs utilization (MFU) as in PaLM (arXiv 2204.02311, appendix B)."""

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting.flops import count_flops, frozen_matrices
from diffmegatron.model.accounting.hardware import Accelerator, find_accelerator


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, num_gpus: int, accelerator: Accelerator
) -> float:
    """Return the achieved model FLOP/s of all GPUs divided by their bf16 peak, from 0 to 1."""
    return tokens_per_second * flops_per_token / (num_gpus * accelerator.peak_flops)


def mfu_metric(
    recipe: Recipe, world_size: int, tokens_per_second: float, device_name: str | None
) -> dict[str, float]:
    """Return ``{"perf/mfu": MFU}``, or {} if the GPU is unknown or the run is not in bf16.

    ``tokens_per_second`` is the sum over all ranks.
    """
    accelerator = None if device_name is None else find_accelerator(device_name)
    if accelerator is None or recipe.training.precision != "bf16":
        return {}
    flops = count_flops(recipe.model, recipe.training.seq_length, frozen_matrices(recipe)).training
    share = model_flops_utilization(tokens_per_second, flops, world_size, accelerator)
    return {"perf/mfu": share}
