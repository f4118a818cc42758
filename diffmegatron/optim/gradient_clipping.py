"""Settings of DeepSpeed's gradient clipping, and norms of single gradients on a rank.

DeepSpeed does the clipping: it computes the norm of all gradients over all ranks, and scales the
gradients before AdamW's update.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.optim.partition import Partition


def clipping_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the entries of DeepSpeed's configuration for gradient clipping.

    In the norm, a parameter that is replicated on several ranks must count once. This needs no
    entry: DeepSpeed recognizes replicas by two attributes of the parameters, which other modules
    set. ``tensor_model_parallel`` is true for parameters that are sharded over the tensor-parallel
    ranks; all others count on the first of these ranks only. ``ds_pipe_replicated`` is true for the
    last pipeline stage's copy of a tied embedding, which does not count.
    """
    return {"gradient_clipping": optimizer.clip_grad_norm}


def local_gradient_norms(
    partition: Partition, network: torch.nn.Module, device: torch.device
) -> tuple[list[torch.nn.Parameter], Tensor]:
    """Return the norm of each gradient that this rank stores before the optimizer step.

    Where ZeRO partitions gradients, it is the norm of this rank's partition of the gradient.

    Args:
        partition: this rank's ZeRO partition; it yields the gradients that DeepSpeed's optimizer
            stores itself, in lists and not on the parameters.
        network: network of this rank; the gradients that are stored on its parameters are included.
        device: device of the result. With an offloaded optimizer, some gradients are in host
            memory.

    Returns:
        The n parameters, and the norms of their gradients, float32 [n] on ``device``. The norms may
        still be in computation there: the function does not synchronize the device.
    """
    held = [*_on_parameters(network), *partition.gradients()]
    if not held:
        return [], torch.zeros(0, device=device)
    norms = torch._foreach_norm([gradient for _, gradient in held])
    on_device = [norm.float().to(device, non_blocking=True) for norm in norms]
    return [parameter for parameter, _ in held], torch.stack(on_device)


def accumulated_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the gradient that ZeRO 1 has accumulated for a parameter; None if there is none.

    DeepSpeed stores it in different attributes for different dtypes.
    """
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
