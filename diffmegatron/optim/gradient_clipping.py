"""Gradient clipping, and the norms of the gradients that a rank holds.

DeepSpeed clips: it computes the norm over all ranks and scales the gradients before AdamW's update.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.optim.partition import Partition


def clipping_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the part of DeepSpeed's configuration that clips gradients to a norm.

    A parameter that several ranks hold counts once. The marks for this are Megatron-core's
    ``tensor_model_parallel`` and, for a tied embedding, DeepSpeed's ``ds_pipe_replicated``.
    """
    return {"gradient_clipping": optimizer.clip_grad_norm}


def held_norms(
    partition: Partition, network: torch.nn.Module, device: torch.device
) -> tuple[list[torch.nn.Parameter], Tensor]:
    """Return the parameters whose gradients this rank holds before a step, and the norms.

    The norms are [n] float32 on ``device``, computed in one pass without synchronization.
    Offloading may have left some gradients in host memory.
    """
    held = [*_on_parameters(network), *partition.gradients()]
    if not held:
        return [], torch.zeros(0, device=device)
    norms = torch._foreach_norm([gradient for _, gradient in held])
    on_device = [norm.float().to(device, non_blocking=True) for norm in norms]
    return [parameter for parameter, _ in held], torch.stack(on_device)


def accumulated_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the gradient that ZeRO 1 accumulates for a parameter; its location varies by dtype."""
    for name in ("_hp_grad", "grad_accum", "grad"):
        gradient = getattr(parameter, name, None)
        if gradient is not None:
            return gradient
    return None


def _on_parameters(network: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    for parameter in network.parameters():
        gradient = accumulated_gradient(parameter)
        if gradient is not None:
            yield parameter, gradient
