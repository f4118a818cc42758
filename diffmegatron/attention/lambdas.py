"""lambda, the weight of the second attention map (Ye et al., ICLR 2025, section 2.1)."""

import math

import torch
from torch import Tensor

from diffmegatron.config.schema import LambdaInit


def lambda_init(policy: LambdaInit, layer_number: int) -> float:
    """lambda_init of a layer.

    Args:
        policy: exponential, 0.8 - 0.6 exp(-0.3 (l - 1)) (the paper's), or a constant.
        layer_number: l, the global layer number from 1: under pipeline parallelism never the
            number within the stage.
    """
    if policy.value is not None:
        return policy.value
    return 0.8 - 0.6 * math.exp(-0.3 * (layer_number - 1))


def differential_lambda(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, initial: float
) -> Tensor:
    """exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init.

    Args:
        lambda_q1, lambda_k1, lambda_q2, lambda_k2: the layer's vectors, each [d] float32.
        initial: lambda_init of the layer.

    Returns:
        0-dim float32 tensor, one value for all heads of the layer.
    """
    first = torch.exp(torch.sum(lambda_q1 * lambda_k1, dtype=torch.float32))
    second = torch.exp(torch.sum(lambda_q2 * lambda_k2, dtype=torch.float32))
    return first - second + initial
