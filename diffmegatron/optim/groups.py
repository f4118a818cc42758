"""Parameter groups: which parameters decay, and which must not share a flat buffer."""

from typing import Any

import torch

from diffmegatron.config.schema import OptimizerConfig


def parameter_groups(network: torch.nn.Module, optimizer: OptimizerConfig) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, norms do not, embeddings and lambda vectors as configured.

    Parameters of different dtypes stay in groups of their own: ZeRO flattens a group into one
    buffer, and a bf16 model keeps its lambda vectors and headwise norms in float32.
    """
    groups: dict[tuple[float, torch.dtype], list[torch.nn.Parameter]] = {}
    for name, parameter in network.named_parameters():
        decay = optimizer.weight_decay if _decays(name, parameter, optimizer) else 0.0
        groups.setdefault((decay, parameter.dtype), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay} for (decay, _), parameters in groups.items()
    ]


def _decays(name: str, parameter: torch.Tensor, optimizer: OptimizerConfig) -> bool:
    if ".lambda_" in name:
        return optimizer.decay_lambda
    if "word_embeddings" in name:
        return optimizer.decay_embeddings
    return parameter.dim() > 1
