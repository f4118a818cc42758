"""AdamW that updates the weights only if a callback, the gate, returns True."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.schema import Recipe
from diffmegatron.model.network import Network, declared_parameter
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.partition import Partition


class GatedAdamW(torch.optim.AdamW):
    """AdamW that can skip a step, and can apply weight decay to only some rows of a parameter."""

    gate: Callable[[], bool]
    decaying_rows: Mapping[Tensor, list[Tensor]]

    def step(self, closure: Any = None) -> Any:
        """Update the weights of ``self.param_groups`` if the gate allows it.

        In one training step, DeepSpeed may call this once per group; ``param_groups`` then has only
        that group.
        """
        if not self.gate():
            return None
        for group in self.param_groups:
            rows = [row for flat in group["params"] for row in self.decaying_rows.get(flat, ())]
            if rows and group["row_decay"]:
                torch._foreach_mul_(rows, 1 - group["lr"] * group["row_decay"])
        return super().step(closure)


def create_adamw(network: Network, recipe: Recipe) -> GatedAdamW:
    """Return this rank's optimizer; the caller must set its ``gate`` and ``decaying_rows``."""
    optimizer = recipe.optimizer
    return GatedAdamW(
        _parameter_groups(network, recipe),
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )


def _parameter_groups(network: Network, recipe: Recipe) -> list[dict[str, Any]]:
    """Group the trained parameters by dtype, weight decay, frozen rows and ``lr_factor``.

    ZeRO flattens a group into one tensor. ``row_decay`` is the weight decay of the trained rows of
    a parameter that also has frozen rows.
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


def decaying_rows(partition: Partition, network: torch.nn.Module) -> dict[Tensor, list[Tensor]]:
    """Return views of the trained rows of partly frozen weights, by flat master tensor."""
    found: dict[Tensor, list[Tensor]] = {}
    for parameter in network.parameters():
        held = partition.range_of(parameter) if hasattr(parameter, "trained_ranges") else None
        if held is None:
            continue
        for begin, end in parameter.trained_ranges:  # type: ignore[attr-defined]
            rows = held.values[max(begin - held.start, 0) : max(end - held.start, 0)]
            if rows.numel():
                found.setdefault(held.flat, []).append(rows)
    return found
