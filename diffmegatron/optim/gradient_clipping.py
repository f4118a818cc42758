"""Settings of DeepSpeed's gradient clipping, and norms of single gradients on a rank."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.optim.partition import Partition


def clipping_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the entries of DeepSpeed's configuration for gradient clipping.

    A replicated parameter must count once in the norm. DeepSpeed recognizes replicas by attributes
    of the parameters. Without ``tensor_model_parallel``, only the first tensor-parallel rank
    counts. With ``ds_pipe_replicated``, set on the last stage's copy of a tied embedding, the copy
    does not count.
    """
    return {"gradient_clipping": optimizer.clip_grad_norm}


def local_gradient_norms(
    partition: Partition, network: torch.nn.Module, device: torch.device
) -> tuple[list[torch.nn.Parameter], Tensor]:
    """Return the norm of each gradient that this rank stores before the optimizer step.

    Gradients are on the network's parameters, or in lists of DeepSpeed's optimizer, which
    ``partition`` yields. Where ZeRO partitions a gradient, the norm is that of this rank's
    partition.

    Returns:
        The n parameters, and the norms of their gradients, float32 [n] on ``device``. The device is
        not synchronized.
    """
    held = [*_on_parameters(network), *partition.gradients()]
    if not held:
        return [], torch.zeros(0, device=device)
    norms = torch._foreach_norm([gradient for _, gradient in held])
    on_device = [norm.float().to(device, non_blocking=True) for norm in norms]
    return [parameter for parameter, _ in held], torch.stack(on_device)


def accumulated_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the gradient that ZeRO 1 has accumulated for a parameter; None if there is none."""
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
