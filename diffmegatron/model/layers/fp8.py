"""Megatron-core's contexts in which Transformer Engine computes a layer's matrix products in FP8.

Only training passes are in FP8: an evaluation computes with the weights of an export, in bf16. The
contexts change Transformer Engine's modules, ``linear_qkv``, ``linear_proj`` and the MLP. All other
operations stay in the run's precision: norms, attention, lambda, gates, embedding, output and loss.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from megatron.core import tensor_parallel
from megatron.core.extensions.transformer_engine import te_checkpoint
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from diffmegatron.errors import UserError
from diffmegatron.model.layers.layer_specs import available_host


def pass_context(layers: MegatronModule) -> AbstractContextManager[object]:
    """Return the context of a forward pass through all layers of a virtual stage.

    Delayed scaling reduces the largest values over the ranks when this context ends, so it needs
    one context for all layers, as in Megatron-core's ``TransformerBlock``.
    """
    config = layers.config
    is_delayed = config.fp8 and config.fp8_recipe == "delayed"
    return get_fp8_context(config) if layers.training and is_delayed else nullcontext()


def layer_context(layer: TransformerLayer) -> AbstractContextManager[object]:
    """Return the context of one layer's forward pass; the first and last layers can be in bf16."""
    config = layer.config
    is_own = config.fp8 and config.fp8_recipe != "delayed"
    if not (layer.training and is_own):
        return nullcontext()
    return get_fp8_context(config, layer.layer_number - 1)


def checkpoint(
    config: TransformerConfig, run: Callable[..., Tensor], *inputs: Tensor | None
) -> Tensor:
    """Return ``run(*inputs)``, of which the backward pass computes everything again.

    In FP8, Transformer Engine repeats the pass with the same scales.
    """
    if not config.fp8:
        return tensor_parallel.checkpoint(run, False, *inputs)
    return te_checkpoint(run, False, get_cuda_rng_tracker, None, *inputs)


def fp8_problem(recipe: str) -> str | None:
    """Return why this process cannot train with a recipe of ``training.fp8``; None if it can."""
    if available_host() != "transformer_engine":
        return (
            f"training.fp8.recipe {recipe!r} needs Transformer Engine and a GPU, and this process "
            "does not have both; install diffmegatron[te], or leave training.fp8 out"
        )
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    available = {
        "blockwise": FP8GlobalStateManager.is_fp8_block_scaling_available,
        "mxfp8": FP8GlobalStateManager.is_mxfp8_available,
    }
    can_run, reason = available.get(recipe, FP8GlobalStateManager.is_fp8_available)()
    if can_run:
        return None
    return f"training.fp8.recipe {recipe!r} cannot run on this GPU: {reason}"


def begin_fp8(recipe: str) -> None:
    """Prepare this process for a run with a recipe of ``training.fp8``; then build its network.

    Raises:
        UserError: this process cannot train with the recipe.
    """
    problem = fp8_problem(recipe)
    if problem is not None:
        raise UserError(problem)
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    # Otherwise, delayed scaling would reduce values of an earlier network of this process.
    FP8GlobalStateManager.reset()
