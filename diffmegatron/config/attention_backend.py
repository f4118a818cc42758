"""Choose the attention backend of a recipe's layers, without torch or a GPU."""

from typing import Literal

from diffmegatron.attention.kernels.registry import (
    LIBRARIES,
    Call,
    choose_backend,
    needed_features,
)
from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.config.divisibility import context_communication
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.errors import UserError

# Libraries whose backends "auto" may choose in estimates. CUDA builds of torch include Triton.
PLANNED_LIBRARIES = frozenset({"triton"})

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def attention_call(recipe: RecipeSections, attention: AttentionKind, device_type: str) -> Call:
    """Return the properties of a layer's attention call; ``device_type`` is "cuda" or "cpu"."""
    needs = needed_features(
        documents=bool(recipe.data.reset_attention_mask),
        context=recipe.parallel.context,
        communication=context_communication(recipe),
    )
    dtype = _DTYPES[recipe.training.precision]
    return Call(attention.operation, device_type, dtype, attention.head_dim, needs)


def layer_backend(
    recipe: RecipeSections, attention: AttentionKind, device_type: str, libraries: frozenset[str]
) -> tuple[str, str]:
    """Return the name of the backend of a layer's attention, and the reason for the choice.

    ``libraries`` are the usable optional libraries. An impossible choice raises UserError.
    """
    call = attention_call(recipe, attention, device_type)
    try:
        return choose_backend(_setting(recipe, attention), call, libraries)
    except ValueError as error:
        raise UserError(f"training.attention_{error}") from None


def planned_backend(
    recipe: RecipeSections, attention: AttentionKind, device: Literal["gpu", "cpu"] = "gpu"
) -> str:
    """Return the name of the backend for which a layer's memory and time are estimated."""
    is_auto = _setting(recipe, attention) == "auto"
    libraries = PLANNED_LIBRARIES if is_auto else frozenset(LIBRARIES)
    device_type = "cpu" if device == "cpu" else "cuda"
    return layer_backend(recipe, attention, device_type, libraries)[0]


def _setting(recipe: RecipeSections, attention: AttentionKind) -> str:
    # The setting applies only to attention with the operation "differential".
    has_two_maps = attention.operation == "differential"
    return recipe.training.attention_backend if has_two_maps else "auto"
