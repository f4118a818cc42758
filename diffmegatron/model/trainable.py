"""What of the network is trained, marked on its parameters.

A parameter that is frozen whole requires no gradient; so it has no optimizer state, and Megatron's
linear layers keep nothing for its gradient. Of a fused projection some rows may be frozen: their
gradient is zero, so that Adam's moments stay zero and its update is nothing.
"""

import torch
from torch import Tensor

from diffmegatron.attention.variants.projection_heads import Heads
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import layer_number, network_tensors
from diffmegatron.config.trainable_patterns import (
    frozen_parts,
    learning_rate_factor,
    trained_parts,
    trains_everything,
)
from diffmegatron.model.network import Network
from diffmegatron.model.parameter_shards import parameter_shards


def mark_trained(network: Network, recipe: Recipe) -> None:
    """Freeze what the recipe does not train, and note at which multiple of the rate it trains.

    Sets ``requires_grad`` and, where they differ from the rest, two attributes of a parameter:
    ``lr_factor``, and ``trained_ranges``, where in the flattened parameter the trained rows are.
    """
    if trains_everything(recipe) and not recipe.optimizer.lr_multipliers:
        return
    tensors = {tensor.name: tensor for tensor in network_tensors(recipe.model)}
    for parameter, (shard, *_) in parameter_shards(network).items():
        tensor = tensors[shard.name]
        parameter.requires_grad_(bool(trained_parts(tensor, recipe)))
        parameter.lr_factor = learning_rate_factor(tensor.name, recipe)  # type: ignore[attr-defined]
        if frozen := frozen_parts(tensor, recipe):
            kind = recipe.model.attention.of_layer(layer_number(shard.name))
            _freeze_rows(parameter, frozen, kind.heads)
    if recipe.recompute.granularity != "none":
        _reach_recomputed_layers(network)


def _freeze_rows(parameter: torch.nn.Parameter, frozen: tuple[str, ...], heads: Heads) -> None:
    """Zero the gradient of some rows of ``linear_qkv``; a rank holds whole blocks of it."""
    kinds = [kind for kind, count in heads.rows for _ in range(count * heads.head_dim)]
    is_frozen = torch.tensor([kind in frozen for kind in kinds], device=parameter.device)
    rows = is_frozen.repeat(parameter.shape[0] // len(kinds))

    def masked(gradient: Tensor) -> Tensor:
        return gradient.masked_fill(rows.view(-1, *[1] * (gradient.dim() - 1)), 0.0)

    parameter.register_hook(masked)
    columns = parameter.numel() // parameter.shape[0]
    parameter.trained_ranges = [  # type: ignore[attr-defined]
        (first * columns, last * columns) for first, last in _runs(~rows)
    ]


def _runs(rows: Tensor) -> list[tuple[int, int]]:
    """Where a mask is true: pairs of the first index and the one after the last."""
    edges = torch.nn.functional.pad(rows.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _reach_recomputed_layers(network: Network) -> None:
    """Have the hidden states that a frozen embedding gives require a gradient.

    Megatron's recomputation is an autograd function, and gives the parameters within none where
    no input of it requires one.
    """

    def require_gradient(module: torch.nn.Module, _: object, hidden: Tensor) -> None:
        if module.training:
            hidden.requires_grad_()

    for stage in network.virtual_stages:
        if stage.pre_process and not stage.embedding.word_embeddings.weight.requires_grad:
            stage.embedding.register_forward_hook(require_gradient)
