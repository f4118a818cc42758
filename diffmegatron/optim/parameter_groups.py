"""Parameter groups of the optimizer, which differ in weight decay, dtype or learning rate."""

from typing import Any

import torch

from diffmegatron.config.schema import Recipe
from diffmegatron.model.network import Network, declared_parameter
from diffmegatron.model.parameter_shards import parameter_shards


def parameter_groups(network: Network, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the parameter groups for AdamW.

    All parameters of a group have these properties in common:

    - Weight decay: matrices have it and norms do not. For embeddings and lambda vectors the recipe
      decides.
    - Dtype: ZeRO flattens a group into one buffer.
    - Whether some rows are frozen. AdamW's ``weight_decay`` is then 0, and ``row_decay`` is the
      weight decay of the trained rows (:class:`~diffmegatron.optim.adamw.GatedAdamW`).
    - ``lr_factor``: number by which the learning rate of the step is multiplied.
    """
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for parameter, (shard, *_) in parameter_shards(network).items():
        if not parameter.requires_grad:
            continue
        decay = recipe.optimizer.weight_decay if _decays(shard.name, parameter, recipe) else 0.0
        by_rows = hasattr(parameter, "trained_ranges")
        settings = {
            "weight_decay": 0.0 if by_rows else decay,
            "row_decay": decay if by_rows else 0.0,
            "lr_factor": getattr(parameter, "lr_factor", 1.0),
        }
        key = (by_rows, parameter.dtype, *settings.values())
        groups.setdefault(key, {"params": [], **settings})["params"].append(parameter)
    return list(groups.values())


def _decays(name: str, parameter: torch.Tensor, recipe: Recipe) -> bool:
    declared = declared_parameter(name, recipe.model)
    if declared is not None:
        is_lambda = declared.role == "lambda"
        return recipe.optimizer.decay_lambda if is_lambda else declared.role == "matrix"
    if "word_embeddings" in name:
        return recipe.optimizer.decay_embeddings
    return parameter.dim() > 1
