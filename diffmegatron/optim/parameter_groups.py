"""Parameter groups: which parameters decay, and which must not share a flat buffer."""

from typing import Any

import torch

from diffmegatron.config.schema import Recipe
from diffmegatron.model.network import Network, declared_parameter
from diffmegatron.model.parameter_shards import parameter_shards


def parameter_groups(network: Network, recipe: Recipe) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay, norms do not, embeddings and lambda vectors as configured.

    Parameters of different dtypes stay in groups of their own: ZeRO flattens a group into one
    buffer, and a bf16 model keeps some of its attention's parameters in float32. So do those of
    which some rows are frozen: AdamW would let all of them decay, so ``row_decay`` is what the
    others shall have (:class:`~diffmegatron.optim.step_gate.GatedAdamW`). ``lr_factor`` is the
    multiple of the learning rate.
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
