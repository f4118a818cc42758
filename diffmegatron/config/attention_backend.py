"""Choose the attention backend of a recipe's layers, without torch or a GPU."""

from typing import Literal

from diffmegatron.attention.kernels.registry import (
    BACKENDS,
    LIBRARIES,
    OPS,
    Call,
    choose_backend,
    needed_features,
)
from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.config.divisibility import choose_context_communication
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.errors import UserError

# Libraries whose backends "auto" may choose in estimates. CUDA builds of torch include Triton.
PLANNED_LIBRARIES = frozenset({"triton"})

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def attention_call(recipe: RecipeSections, kind: AttentionKind, device_type: str) -> Call:
    """Return the properties of a layer's attention call; ``device_type`` is "cuda" or "cpu"."""
    needs = needed_features(
        documents=bool(recipe.data.reset_attention_mask),
        context=recipe.parallel.context,
        communication=choose_context_communication(recipe),
    )
    dtype = _DTYPES[recipe.training.precision]
    return Call(kind.operation, device_type, dtype, kind.head_dim, needs)


def layer_backend(
    recipe: RecipeSections, kind: AttentionKind, device_type: str, libraries: frozenset[str]
) -> tuple[str, str]:
    """Return the name of the backend of a layer's attention, and the reason for the choice.

    ``libraries`` are the usable optional libraries.

    Raises:
        UserError: ``training.attention_backend`` is not a backend of the kind's operation, or it
            cannot run with this recipe on this device with these libraries.
    """
    setting, known = recipe.training.attention_backend, BACKENDS[kind.operation]
    if setting != "auto" and setting not in known:
        raise UserError(
            f"training.attention_backend {setting!r} does not compute {OPS[kind.operation]}, which "
            f"the layers of kind {kind.kind!r} need; choose auto or {', '.join(known)}"
        )
    try:
        return choose_backend(setting, attention_call(recipe, kind, device_type), libraries)
    except ValueError as error:
        raise UserError(f"training.attention_{error}") from None


def planned_backend(
    recipe: RecipeSections, kind: AttentionKind, device: Literal["gpu", "cpu"] = "gpu"
) -> str:
    """Return the name of the backend for which a layer's memory and time are estimated."""
    is_auto = recipe.training.attention_backend == "auto"
    libraries = PLANNED_LIBRARIES if is_auto else frozenset(LIBRARIES)
    device_type = "cpu" if device == "cpu" else "cuda"
    return layer_backend(recipe, kind, device_type, libraries)[0]
