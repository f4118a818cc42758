"""Rules of ``training.fp8``, and the layers whose matrix products are in FP8."""

from collections.abc import Iterator

from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.config.tensors import NamedTensor, layer_tensors, stage_kinds, stage_layers

# Every dimension of a product must be a multiple of this number (``is_quantizable`` of Transformer
# Engine's quantizers, and cuBLAS).
FP8_MULTIPLES = {"tensorwise": 16, "delayed": 16, "mxfp8": 32, "blockwise": 128}

# First compute capability with the products (``check_recipe_support`` of Transformer Engine).
FP8_CAPABILITIES = {"tensorwise": (8, 9), "delayed": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0)}


def check_fp8(recipe: RecipeSections) -> None:
    """Refuse settings that do not work with ``training.fp8``; the layout has been checked."""
    training, parallel, fp8 = recipe.training, recipe.parallel, recipe.training.fp8
    if fp8 is None:
        return
    if training.precision != "bf16":
        raise ValueError(
            f"training.precision {training.precision!r} does not fit training.fp8, which leaves "
            "everything but matrix products in bf16; give 'bf16', or leave training.fp8 out"
        )
    if recipe.model.lora is not None:
        raise ValueError(
            "training.fp8 needs Transformer Engine's layers, and model.lora Megatron-core's; leave "
            "one of them out"
        )
    if parallel.zero_stage == 3:
        raise ValueError(
            "parallel.zero_stage 3 with training.fp8 would partition the bf16 weights, but not "
            "Transformer Engine's FP8 copies of them; give 1 or 2"
        )
    if training.offload_activations:
        raise ValueError(
            "training.offload_activations with training.fp8 would also copy the FP8 weights to the "
            "host in every microbatch; leave it out, or recompute activations"
        )
    _check_layers(recipe)
    _check_multiples(recipe)


def _check_layers(recipe: RecipeSections) -> None:
    """Check the numbers of layers that remain in bf16, with Megatron-core's limits."""
    fp8, layers = recipe.training.fp8, recipe.model.num_layers
    assert fp8 is not None
    given = {"first": fp8.first_layers_bf16, "last": fp8.last_layers_bf16}
    if fp8.recipe == "delayed" and any(given.values()):
        raise ValueError(
            "training.fp8.recipe 'delayed' updates the scales of all layers together, so none can "
            "remain in bf16; set first_layers_bf16 and last_layers_bf16 to 0, or give 'tensorwise'"
        )
    if sum(given.values()) >= layers:
        raise ValueError(
            f"training.fp8.first_layers_bf16 {given['first']} and last_layers_bf16 "
            f"{given['last']} leave none of the {layers} layers in FP8; give fewer"
        )
    stage = layers // recipe.parallel.pipeline
    for name, count in given.items():
        if count > stage:
            raise ValueError(
                f"training.fp8.{name}_layers_bf16 {count} is more than the {stage} layers of a "
                f"pipeline stage; give at most {stage}"
            )


def _check_multiples(recipe: RecipeSections) -> None:
    assert recipe.training.fp8 is not None
    name = recipe.training.fp8.recipe
    multiple = FP8_MULTIPLES[name]
    for words, size in _dimensions(recipe):
        if size % multiple:
            raise ValueError(
                f"training.fp8.recipe {name!r} needs products of multiples of {multiple}, "
                f"and {words} is {size}; change it, or leave training.fp8 out"
            )


def _dimensions(recipe: RecipeSections) -> Iterator[tuple[str, int]]:
    """Yield each dimension of a rank's products, with its name in words."""
    model, training, parallel = recipe.model, recipe.training, recipe.parallel
    shards = parallel.tensor if parallel.sequence_parallel else 1
    yield "model.hidden_size", model.hidden_size
    yield (
        "model.ffn_hidden_size / parallel.tensor",
        model.ffn_hidden_size // parallel.tensor,
    )
    for kind in model.attention.kinds:
        for words, channels in (
            ("the number of channels of linear_qkv", kind.heads.qkv_channels),
            ("the number of channels of linear_proj", kind.heads.output_channels),
        ):
            yield f"{words} / parallel.tensor", channels // parallel.tensor
    divided = " / parallel.tensor" if shards > 1 else ""
    yield (
        f"training.micro_batch_size x seq_length / parallel.context{divided}",
        training.micro_batch_size * training.seq_length // parallel.context // shards,
    )


def fp8_layers(recipe: RecipeSections, stage: int) -> int:
    """Return the number of layers of a pipeline stage (from 0) whose products are in FP8."""
    fp8 = recipe.training.fp8
    if fp8 is None:
        return 0
    last = recipe.model.num_layers - fp8.last_layers_bf16
    return sum(
        fp8.first_layers_bf16 <= layer < last
        for layers in stage_layers(recipe, stage)
        for layer in layers
    )


def fp8_matrices(recipe: RecipeSections, stage: int) -> float:
    """Return the elements on a rank of the matrices that a pipeline stage multiplies in FP8.

    With a pattern of kinds of attention, the number belongs to the stage's average layer.
    """
    if recipe.training.fp8 is None:
        return 0.0
    kinds = stage_kinds(recipe, stage)
    elements = sum(
        count * tensor.elements(recipe.parallel.tensor)
        for kind, count in kinds
        for tensor in layer_tensors(recipe.model, kind)
        if is_product(tensor)
    )
    return elements * fp8_layers(recipe, stage) / sum(count for _, count in kinds)


def is_product(tensor: NamedTensor) -> bool:
    """Return whether Transformer Engine multiplies by this tensor of a layer."""
    return ".linear_" in tensor.name and tensor.is_matrix
