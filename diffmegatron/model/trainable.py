"""Attributes and hooks of parameters for frozen tensors, frozen rows and learning-rate factors."""

import torch
from torch import Tensor

from diffmegatron.attention.kinds.layer import Heads
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import layer_number, network_tensors
from diffmegatron.config.trainable_patterns import (
    frozen_parts,
    learning_rate_factor,
    trained_parts,
    trains_everything,
)
from diffmegatron.config.width_scaling import width_ratio
from diffmegatron.model.network import Network
from diffmegatron.model.parameter_shards import parameter_shards


def mark_trained(network: Network, recipe: Recipe) -> None:
    """Set attributes of the parameters from the recipe's ``trainable`` and ``lr_multipliers``.

    - ``requires_grad``: False for a fully frozen parameter.
    - ``lr_factor``: factor of the learning rate; a missing attribute means 1.
    - ``trained_ranges``: ranges (first, end) of the trained rows' elements in the flattened
      parameter; set only if some rows are frozen.
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
        _require_hidden_gradients(network)


def divide_final_gradient(network: Network, recipe: Recipe) -> None:
    """Divide the gradient of the final norm's weight by the width ratio of muP.

    A weight of 1 whose product is divided by this ratio has this gradient. The undivided gradient
    would dominate the norm of all gradients, and thereby their clipping, in wide networks.
    """
    ratio = width_ratio(recipe.model)
    for stage in network.virtual_stages:
        norm = stage.decoder.final_layernorm
        if ratio != 1 and norm is not None and norm.weight.requires_grad:
            norm.weight.register_hook(lambda gradient: gradient / ratio)


def _freeze_rows(parameter: torch.nn.Parameter, frozen: tuple[str, ...], heads: Heads) -> None:
    """Set the gradient of frozen rows of ``linear_qkv`` to 0 by a hook, and set ``trained_ranges``.

    ``frozen`` has the names of the frozen rows, such as "q".
    """
    kinds = [kind for kind, count in heads.rows for _ in range(count * heads.head_dim)]
    is_frozen = torch.tensor([kind in frozen for kind in kinds])
    rows = is_frozen.repeat(parameter.shape[0] // len(kinds))
    on_device = rows.to(parameter.device)

    def masked(gradient: Tensor) -> Tensor:
        return gradient.masked_fill(on_device.view(-1, *[1] * (gradient.dim() - 1)), 0.0)

    parameter.register_hook(masked)
    # Row indices of the trained ranges: first begin, first end, second begin, and so on.
    edges = torch.nn.functional.pad((~rows).int(), (1, 1)).diff().nonzero().flatten()
    offsets = (edges * (parameter.numel() // parameter.shape[0])).tolist()
    ranges = list(zip(offsets[::2], offsets[1::2], strict=True))
    parameter.trained_ranges = ranges  # type: ignore[attr-defined]


def _require_hidden_gradients(network: Network) -> None:
    """Make the output of a frozen embedding require a gradient.

    Megatron-core recomputes layers in an autograd function. Autograd skips the function's backward
    pass if its only tensor input, the hidden states, requires no gradient.
    """

    def require_gradient(module: torch.nn.Module, _: object, hidden: Tensor) -> None:
        if module.training:
            hidden.requires_grad_()

    for stage in network.virtual_stages:
        if stage.pre_process and not stage.embedding.word_embeddings.weight.requires_grad:
            stage.embedding.register_forward_hook(require_gradient)
