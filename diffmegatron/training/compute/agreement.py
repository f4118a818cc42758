"""Reductions of a step's results over ranks: loss, gradient norm, flags and lambda."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.step import LossSum


@dataclass(frozen=True)
class Agreement:
    """Values that :func:`agree` has made equal on every rank."""

    # Mean cross-entropy of the counted tokens, infinite if a rank's value is not finite. It is None
    # if no token is counted and the losses of all other tokens are finite.
    loss: float | None
    z_loss: float  # mean z-loss of the counted tokens; 0 without a z-loss
    loss_tokens: int  # number of counted tokens
    gradient_norm: float  # maximum over the ranks; infinite if a rank's value is not finite
    stop: bool  # whether at least one rank must stop
    writing: bool  # whether at least one rank is still writing its checkpoint file


def agree(
    loss: LossSum | None = None,
    gradient_norm: Tensor | float = 0.0,
    *,
    stop: bool = False,
    writing: bool = False,
    parallel_state: ParallelState,
) -> Agreement:
    """Return the maximum of each value over all ranks; every rank must call this function.

    If values differed between ranks in the last bit, only some ranks might apply a step. The
    function waits for the device.

    Args:
        loss: loss of a global batch; None if there is no batch.
        gradient_norm: 0-dim float32 or a number.
    """
    flags = torch.tensor([stop, writing], dtype=torch.float32, device=parallel_state.device)
    norm = torch.as_tensor(gradient_norm, dtype=torch.float32, device=parallel_state.device)
    if loss is None:
        loss = LossSum(*torch.zeros_like(norm).expand(3))
    numbers = torch.cat([torch.stack([loss.mean, loss.z_mean, loss.tokens, norm]), flags])
    # The maximum of NaN and a number depends on the communication library, so replace NaN.
    numbers = torch.where(numbers.isfinite(), numbers, torch.inf)
    distributed.all_reduce(numbers, op=distributed.ReduceOp.MAX)
    mean, z_mean, tokens, largest_norm, any_stop, any_writing = numbers.tolist()
    return Agreement(
        loss=mean if tokens or mean else None,
        z_loss=z_mean,
        loss_tokens=int(tokens),
        gradient_norm=largest_norm,
        stop=bool(any_stop),
        writing=bool(any_writing),
    )


def lambdas(network: Network, parallel_state: ParallelState) -> dict[str, float]:
    """Return lambda of each differential layer as a metric; all ranks must call this.

    Lambda is the factor of the subtracted softmax map. Each value is a mean over all heads. A
    lambda that depends on the token is also averaged over this rank's tokens in the last forward
    pass. A name is, for example, ``attn/lambda_layer_01``.
    """
    own = network.lambda_by_layer()
    if own and parallel_state.tensor_size > 1:
        means = torch.stack(list(own.values()))
        distributed.all_reduce(means, group=parallel_state.tensor_group)
        own = dict(zip(own, means / parallel_state.tensor_size, strict=True))
    mine = {layer: value.item() for layer, value in own.items()}
    stages: list[dict[int, float]] = [{} for _ in range(parallel_state.pipeline_size)]
    distributed.all_gather_object(stages, mine, group=parallel_state.pipeline_group)
    layers = {layer: value for stage in stages for layer, value in stage.items()}
    return {f"attn/lambda_layer_{layer:02d}": layers[layer] for layer in sorted(layers)}


def largest_logits(
    own: Mapping[int, Tensor], num_layers: int, parallel_state: ParallelState
) -> dict[str, float]:
    """Return the largest attention logit of each layer as a metric; all ranks must call this.

    ``own`` has the result of ``observed_logits`` on this rank, and is empty on no rank or on all. A
    name is, for example, ``attn/max_logit_layer_01``, or ``attn/max_noise_logit_layer_01`` for the
    map that is subtracted. A value is infinite if a logit is not a number.
    """
    if not own:
        return {}
    whole = torch.full((num_layers, 2), -torch.inf, device=parallel_state.device)
    for layer, values in own.items():
        whole[layer - 1, : len(values)] = values
    # The maximum of NaN and a number depends on the communication library, so replace NaN.
    whole = whole.nan_to_num(torch.inf, torch.inf, -torch.inf)
    distributed.all_reduce(whole, op=distributed.ReduceOp.MAX)
    names = ("attn/max_logit_layer", "attn/max_noise_logit_layer")
    return {
        f"{name}_{layer:02d}": value
        for layer, values in enumerate(whole.tolist(), 1)
        for name, value in zip(names, values, strict=True)
        if value > -torch.inf
    }
