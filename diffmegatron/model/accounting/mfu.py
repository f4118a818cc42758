"""Model FLOPs utilization (MFU): the model's FLOPs as a share of the GPUs' bf16 peak."""

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting.hardware import Accelerator, find_accelerator
from diffmegatron.model.accounting.parameters import count_flops, frozen_matrices


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, num_gpus: int, accelerator: Accelerator
) -> float:
    """Return the model's FLOPs as a share of the GPUs' peak (PaLM, arXiv 2204.02311, appendix B).

    Args:
        tokens_per_second: speed of the whole run.
        flops_per_token: ``count_flops(...).training``.
        num_gpus: number of GPUs.
        accelerator: type of the GPUs.
    """
    return tokens_per_second * flops_per_token / (num_gpus * accelerator.peak_flops)


def mfu_metric(
    recipe: Recipe, world_size: int, tokens_per_second: float, device_name: str | None
) -> dict[str, float]:
    """Return ``perf/mfu``, the MFU of a run.

    Empty on a CPU, on a GPU whose peak is not in the table, and in float32.

    Args:
        recipe: recipe of the run.
        world_size: number of ranks, with one GPU each.
        tokens_per_second: speed of the whole run.
        device_name: CUDA's name of the GPUs; None on a CPU.
    """
    accelerator = None if device_name is None else find_accelerator(device_name)
    if accelerator is None or recipe.training.precision != "bf16":
        return {}
    flops = count_flops(recipe.model, recipe.training.seq_length, frozen_matrices(recipe)).training
    share = model_flops_utilization(tokens_per_second, flops, world_size, accelerator)
    return {"perf/mfu": share}
