"""Model FLOPs utilization (MFU), as in appendix B of PaLM (arXiv 2204.02311)."""

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting.flops import count_flops, frozen_matrices
from diffmegatron.model.accounting.hardware import Accelerator, find_accelerator


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, num_gpus: int, accelerator: Accelerator
) -> float:
    """Return the achieved model FLOP/s divided by the GPUs' bf16 peak, a number from 0 to 1.

    ``tokens_per_second`` is the speed of the whole run.
    """
    return tokens_per_second * flops_per_token / (num_gpus * accelerator.peak_flops)


def mfu_metric(
    recipe: Recipe, world_size: int, tokens_per_second: float, device_name: str | None
) -> dict[str, float]:
    """Return ``{"perf/mfu": MFU}``; empty on a CPU, on an unknown GPU and in a float32 run.

    ``tokens_per_second`` is the speed of the whole run. ``device_name`` is the name that CUDA
    reports; None on a CPU.
    """
    accelerator = None if device_name is None else find_accelerator(device_name)
    if accelerator is None or recipe.training.precision != "bf16":
        return {}
    flops = count_flops(recipe.model, recipe.training.seq_length, frozen_matrices(recipe)).training
    share = model_flops_utilization(tokens_per_second, flops, world_size, accelerator)
    return {"perf/mfu": share}
