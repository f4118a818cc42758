"""DeepSpeed's settings for gradient clipping, and norms of the gradient elements on this rank."""

from typing import Any

import torch
from torch import Tensor, distributed

from diffmegatron.config.optimizer_config import OptimizerConfig
from diffmegatron.optim.partition import Partition


def clipping_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    """Return the entries of DeepSpeed's configuration for gradient clipping."""
    return {"gradient_clipping": optimizer.clip_grad_norm}


def sum_norms_at_once(zero_optimizer: Any) -> None:
    """Make DeepSpeed sum the squared gradient norms over the model-parallel ranks in one call.

    DeepSpeed's ZeRO 1 of a float32 or offloaded run makes a call for each parameter group. It would
    wait forever if the pipeline stages had different numbers of groups, for instance because only
    the tensors of one stage have a learning rate.
    """
    norm_of_the_stage = zero_optimizer.scaled_global_norm
    reduce_over_model = zero_optimizer._model_parallel_all_reduce

    def scaled_global_norm(norm_type: int = 2) -> Tensor:
        squared: Tensor = norm_of_the_stage(norm_type).square()
        distributed.all_reduce(squared, group=zero_optimizer.model_parallel_group)
        return squared.sqrt()

    def reduce_except_norms(tensor: Tensor, op: Any) -> None:
        # Only norms are summed. The maximum of the overflow flags must remain: without it, the
        # stage with an overflow would skip the norm, for which the other stages would wait.
        if op.name != "SUM":
            reduce_over_model(tensor, op)

    zero_optimizer._model_parallel_all_reduce = reduce_except_norms
    zero_optimizer.scaled_global_norm = scaled_global_norm


def accumulated_gradient(parameter: torch.nn.Parameter) -> Tensor | None:
    """Return the gradient that ZeRO 1 has accumulated for a parameter; None if there is none."""
    # The attribute depends on the dtype.
    for name in ("_hp_grad", "grad_accum", "grad"):
        gradient = getattr(parameter, name, None)
        if gradient is not None:
            return gradient
    return None


def local_gradient_norms(
    partition: Partition, network: torch.nn.Module, device: torch.device
) -> tuple[list[torch.nn.Parameter], Tensor]:
    """Return the n parameters with gradient elements on this rank, and the norms of these elements.

    The norms are float32 [n] on ``device``, and the host does not wait for them.
    """
    on_parameters = ((each, accumulated_gradient(each)) for each in network.parameters())
    held = [(each, gradient) for each, gradient in on_parameters if gradient is not None]
    held += partition.gradients()
    if not held:
        return [], torch.zeros(0, device=device)
    norms = torch._foreach_norm([gradient for _, gradient in held])
    # With an offloaded optimizer, some gradients are in host memory.
    on_device = [norm.float().to(device, non_blocking=True) for norm in norms]
    return [parameter for parameter, _ in held], torch.stack(on_device)
