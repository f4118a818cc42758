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


def planned_backend(
    recipe: RecipeSections, attention: AttentionKind, device: Literal["gpu", "cpu"] = "gpu"
) -> str:
    """Return the name of the backend for which a layer's memory and time are estimated.

    ``training.attention_backend`` applies only to attention with the operation "differential".
    """
    has_two_maps = attention.operation == "differential"
    setting = recipe.training.attention_backend if has_two_maps else "auto"
    libraries = PLANNED_LIBRARIES if setting == "auto" else frozenset(LIBRARIES)
    call = attention_call(recipe, attention, "cpu" if device == "cpu" else "cuda")
    try:
        return choose_backend(setting, call, libraries)[0]
    except ValueError as error:
        raise UserError(f"training.attention_{error}") from None
