"""AdamW and Muon, which update the weights only if a callback, the gate, returns True."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import network_tensors
from diffmegatron.config.width_scaling import matrix_rate, width_factors
from diffmegatron.model.network import declared_parameter
from diffmegatron.model.parameter_shards import ParameterShards
from diffmegatron.optim.muon import FlatMuon, muon_parameters
from diffmegatron.optim.partition import Partition

# Names of Adam's moments in torch's optimizer state. Muon's momentum, which is an average of the
# gradients too, has the name of the first.
MOMENTS = ("exp_avg", "exp_avg_sq")


class GatedOptimizer(torch.optim.AdamW):
    """AdamW that can skip a step, and can apply weight decay to only some rows of a parameter.

    Muon updates the flat tensors of ``muon`` instead.
    """

    gate: Callable[[], bool]
    decaying_rows: Mapping[Tensor, list[Tensor]]
    muon: Mapping[Tensor, FlatMuon]

    def step(self, closure: Any = None) -> Any:
        """Update the weights of ``self.param_groups`` if the gate allows it.

        In one training step, DeepSpeed may call this once per group; ``param_groups`` then has only
        that group.
        """
        if not self.gate():
            return None
        groups = self.param_groups
        for group in groups:
            rows = [row for flat in group["params"] for row in self.decaying_rows.get(flat, ())]
            if rows and group["row_decay"]:
                torch._foreach_mul_(rows, 1 - group["lr"] * group["row_decay"])
            for flat in group["params"]:
                if flat in self.muon:
                    self.create_state(flat)
                    state = self.state[flat]
                    state["step"] += 1
                    self.muon[flat].update(
                        flat, state["exp_avg"], group["lr"], group["weight_decay"]
                    )
        self.param_groups = [group for group in groups if not group["is_muon"]]
        try:
            return super().step(closure)
        finally:
            self.param_groups = groups

    def create_state(self, flat: Tensor) -> None:
        """Create the state of a flat tensor with zeros, unless it exists."""
        state = self.state[flat]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
            for name in MOMENTS[:1] if flat in self.muon else MOMENTS:
                state[name] = torch.zeros_like(flat.data)


def create_optimizer(shards: ParameterShards, recipe: Recipe) -> GatedOptimizer:
    """Return this rank's optimizer.

    The caller must set its ``gate``, ``decaying_rows`` and ``muon``.
    """
    optimizer = recipe.optimizer
    return GatedOptimizer(
        _parameter_groups(shards, recipe),
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )


def _parameter_groups(shards: ParameterShards, recipe: Recipe) -> list[dict[str, Any]]:
    """Group the trained parameters by optimizer, dtype, weight decay, frozen rows and factor.

    ZeRO flattens a group into one tensor. ``row_decay`` is the weight decay of the trained rows of
    a parameter that also has frozen rows. ``lr_factor`` multiplies the learning rate, and thereby
    the weight decay of a step, except for the factor of muP.
    """
    muon = muon_parameters(shards, recipe)
    tensors = {tensor.name: tensor for tensor in network_tensors(recipe.model)}
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for parameter, (shard, *_) in shards.items():
        if not parameter.requires_grad:
            continue
        decay = recipe.optimizer.weight_decay if _decays(shard.name, parameter, recipe) else 0.0
        by_rows, is_muon = hasattr(parameter, "trained_ranges"), parameter in muon
        factor = recipe.optimizer.muon_lr_factor if is_muon else 1.0
        _, rate, epsilon = width_factors(tensors[shard.name], recipe.model)
        rate = matrix_rate(recipe) if is_muon else rate
        settings = {
            "weight_decay": 0.0 if by_rows else decay / rate,
            "row_decay": decay / rate if by_rows else 0.0,
            "lr_factor": factor * getattr(parameter, "lr_factor", 1.0) * rate,
            "eps": recipe.optimizer.eps * epsilon,
            "is_muon": is_muon,
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
