"""Kernels of a recipe: the shapes of its calls, and the choice of its attention backends.

No function needs torch or a GPU.
"""

from typing import Literal

from diffmegatron.attention.costs import costs_of
from diffmegatron.attention.kernels.registry import (
    BACKENDS,
    LIBRARIES,
    OPS,
    Call,
    choose_backend,
    find_backend,
    needed_features,
    why_not,
)
from diffmegatron.attention.kinds.kind import AttentionKind, window_in
from diffmegatron.attention.kinds.layer import HEAD_NORM
from diffmegatron.config.divisibility import choose_context_communication
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.config.training_config import KindKernels, LossKernel, even_chunk
from diffmegatron.errors import UserError
from diffmegatron.measurements.records import KernelShape

# Libraries whose backends "auto" may choose in estimates. CUDA builds of torch include Triton.
PLANNED_LIBRARIES = frozenset({"triton"})

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def run_dtype(recipe: RecipeSections) -> str:
    """Return torch's name of the dtype in which a run computes."""
    return _DTYPES[recipe.training.precision]


def attention_call(
    recipe: RecipeSections, kind: AttentionKind, device_type: str, chip: int | None = None
) -> Call:
    """Return the properties of a layer's attention call.

    ``device_type`` is "cuda" or "cpu", and ``chip`` the GPU's major compute capability, if known.
    """
    needs = needed_features(
        documents=bool(recipe.data.reset_attention_mask),
        windows=window_in(kind, recipe.training.seq_length) is not None,
        context=recipe.parallel.context,
        communication=choose_context_communication(recipe),
    )
    return Call(kind.operation, device_type, run_dtype(recipe), kind.head_dim, needs, chip)


def attention_shape(recipe: RecipeSections, kind: AttentionKind) -> KernelShape:
    """Return the shape of the largest attention call of a layer on one rank.

    With all-gathered keys, it is the call whose queries see the whole sequence. A ring attends
    chunk by chunk. Within packed documents, the sequences of a call are concatenated or split.
    """
    parallel, training = recipe.parallel, recipe.training
    call = attention_call(recipe, kind, "cpu")
    communication = choose_context_communication(recipe) if parallel.context > 1 else None
    sizes = costs_of(kind).kernel_sizes(element=0, keys=0)
    shards = parallel.tensor * (parallel.context if communication == "ulysses" else 1)
    batch, length = training.micro_batch_size, training.seq_length
    keys = length
    if communication in ("ring", "all_gather"):
        length //= 2 * parallel.context
        keys = length if communication == "ring" else keys
        batch = 1 if "documents" in call.needs else batch
    elif "documents" in call.needs:
        batch, length = 1, batch * length
        keys = length
    has_norm = any(each.name == HEAD_NORM for each in kind.parameters(recipe.model.hidden_size))
    return KernelShape(
        operation=kind.operation,
        dtype=call.dtype,
        batch=batch,
        length=length,
        keys=keys,
        head_dim=kind.head_dim,
        signal_heads=sizes.signal_heads // shards,
        noise_heads=sizes.noise_heads // shards,
        kv_heads=sizes.kv_heads // shards,
        features=tuple(sorted(call.needs)),
        window=window_in(kind, training.seq_length),
        has_norm=has_norm and kind.operation == "differential",
        is_deterministic=training.deterministic,
    )


def subtraction_shape(recipe: RecipeSections, kind: AttentionKind) -> KernelShape | None:
    """Return the shape of a layer's subtraction of noise heads on one rank; None without one."""
    heads = kind.heads
    if kind.operation != "softmax" or heads.output_channels == heads.query_channels:
        return None
    signal = heads.output_channels // heads.head_dim
    parallel, training = recipe.parallel, recipe.training
    return KernelShape(
        operation="subtraction",
        dtype=run_dtype(recipe),
        batch=training.micro_batch_size,
        length=training.seq_length // parallel.context,
        head_dim=kind.head_dim,
        signal_heads=signal // parallel.tensor,
        noise_heads=(heads.queries - signal) // parallel.tensor,
        is_deterministic=training.deterministic,
    )


def loss_shape(recipe: RecipeSections) -> KernelShape:
    """Return the shape of the loss of a rank's tokens, or of the largest chunk of them."""
    training, parallel = recipe.training, recipe.parallel
    shards = parallel.tensor if parallel.sequence_parallel else 1
    positions = training.seq_length // parallel.context // shards
    if training.loss_chunk is not None:
        positions = even_chunk(positions, -(-training.loss_chunk // shards))
    return KernelShape(
        operation="loss",
        dtype=run_dtype(recipe),
        batch=1,
        length=training.micro_batch_size * positions * shards,
        head_dim=recipe.model.vocab_size // parallel.tensor,
        signal_heads=1,
        kv_heads=1,
    )


def layer_backend(
    recipe: RecipeSections,
    kind: AttentionKind,
    device_type: str,
    libraries: frozenset[str],
    chip: int | None = None,
) -> tuple[str, str]:
    """Return the name of the backend of a layer's attention, and the reason for the choice.

    ``libraries`` are the usable optional libraries, and ``chip`` is the GPU's major compute
    capability, if known.

    Raises:
        UserError: ``training.attention_backend`` is not a backend of the kind's operation, or it
            cannot run with this recipe on this device with these libraries.
    """
    setting = recipe.training.attention_backend
    call = attention_call(recipe, kind, device_type, chip)
    chosen = chosen_kernels(recipe, kind, device_type)
    if chosen is not None and why_not(chosen.attention, call, libraries) is None:
        return chosen.attention, chosen.origin
    if setting != "auto" and find_backend(kind.operation, setting) is None:
        raise UserError(
            f"training.attention_backend {setting!r} does not compute {OPS[kind.operation]}, which "
            f"the layers of kind {kind.kind!r} need; choose auto or "
            + ", ".join(BACKENDS[kind.operation])
        )
    try:
        return choose_backend(setting, call, libraries)
    except ValueError as error:
        raise UserError(f"training.attention_{error}") from None


def chosen_kernels(
    recipe: RecipeSections, kind: AttentionKind, device_type: str
) -> KindKernels | None:
    """Return the kernels that ``auto`` chose for a kind in this run, or None."""
    chosen = recipe.training.chosen_kernels
    if recipe.training.attention_backend != "auto" or chosen is None:
        return None
    kinds = recipe.model.attention.kinds
    if chosen.device != device_type or len(chosen.kinds) != len(kinds):
        return None
    found = chosen.kinds[kinds.index(kind)]
    return found if find_backend(kind.operation, found.attention) else None


def chosen_loss(recipe: RecipeSections, device_type: str, libraries: frozenset[str]) -> LossKernel:
    """Return the kernel of the loss that ``auto`` chose in this run, or "auto".

    A chosen kernel that cannot run with ``libraries``, the usable optional libraries, is not
    returned.
    """
    chosen = recipe.training.chosen_kernels
    if chosen is None or recipe.training.attention_backend != "auto":
        return "auto"
    if chosen.device != device_type or why_not_loss(chosen.loss, device_type, libraries):
        return "auto"
    return chosen.loss


def why_not_loss(name: LossKernel, device_type: str, libraries: frozenset[str]) -> str | None:
    """Return the reason why a kernel of the loss cannot run, or None if it can.

    The reason is a clause without a subject, as :func:`why_not` returns it.
    """
    if name != "triton":
        return None
    # The kernels of the loss and of the subtraction are both written in Triton, for any size.
    return why_not("triton", Call("subtraction", device_type, "bfloat16", 128), libraries)


def planned_backend(
    recipe: RecipeSections, kind: AttentionKind, device: Literal["gpu", "cpu"] = "gpu"
) -> str:
    """Return the name of the backend for which a layer's memory and time are estimated.

    It is the one that ``auto`` has chosen in this run, with any library. Otherwise, ``auto`` is
    assumed to find only the libraries of CUDA builds of torch.
    """
    device_type = "cpu" if device == "cpu" else "cuda"
    is_auto = recipe.training.attention_backend == "auto"
    is_chosen = chosen_kernels(recipe, kind, device_type) is not None
    libraries = PLANNED_LIBRARIES if is_auto and not is_chosen else frozenset(LIBRARIES)
    return layer_backend(recipe, kind, device_type, libraries)[0]
