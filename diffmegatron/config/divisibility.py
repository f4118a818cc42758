"""Check that a parallel layout divides the model and its batches."""

import math
from typing import Literal

from diffmegatron.attention.kernels.registry import whole_sequence_backends
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.errors import UserError
from diffmegatron.files import shorten
from diffmegatron.section import divisors

# Largest number of ranks; the limit keeps the search for layouts (plan/search.py) fast.
MAX_WORLD_SIZE = 2**20


def check_parallel_layout(recipe: RecipeSections) -> None:
    """Check the rules of the parallel layout that do not depend on the number of ranks."""
    _check_tensor(recipe)
    _check_context(recipe)
    _check_ring(recipe)
    _check_pipeline(recipe)
    _check_recompute(recipe)


def data_parallel_size(recipe: RecipeSections, world_size: int) -> int:
    """Check that ranks and batches fit the layout, and return the data-parallel size."""
    check_ranks(world_size)
    parallel, training = recipe.parallel, recipe.training
    if world_size % parallel.model_ranks:
        raise UserError(
            f"{'1 rank does' if world_size == 1 else f'{world_size} ranks do'} not fill "
            f"parallel.tensor {parallel.tensor} x parallel.context "
            f"{parallel.context} x parallel.pipeline {parallel.pipeline}; start a multiple of "
            f"{parallel.model_ranks}, the nearest is "
            f"{max(1, round(world_size / parallel.model_ranks)) * parallel.model_ranks}"
        )
    data = world_size // parallel.model_ranks
    per_microbatch = data * training.micro_batch_size
    batch = training.global_batch_size
    if batch % per_microbatch:
        # The global batch size often comes from a paper, so propose another micro_batch_size first.
        smaller = range(training.micro_batch_size - 1, 0, -1)
        micro = next((size for size in smaller if batch % (data * size) == 0), None)
        nearest = max(1, round(batch / per_microbatch)) * per_microbatch
        remedy = (
            f"{nearest} would be" if micro is None else f"give training.micro_batch_size {micro}"
        )
        raise UserError(
            f"training.global_batch_size {batch} is not a multiple of micro_batch_size "
            f"{training.micro_batch_size} x data parallel {data}; {remedy}"
        )
    microbatches = batch // per_microbatch
    if parallel.virtual_pipeline > 1 and microbatches % parallel.pipeline:
        rounds = max(1, round(microbatches / parallel.pipeline))
        raise UserError(
            f"{microbatches} microbatches per data-parallel rank are not a multiple of "
            f"parallel.pipeline {parallel.pipeline}, as parallel.virtual_pipeline "
            f"{parallel.virtual_pipeline} needs; the nearest training.global_batch_size that fits "
            f"is {rounds * parallel.pipeline * per_microbatch}"
        )
    return data


def choose_context_communication(
    recipe: RecipeSections,
) -> Literal["ring", "all_gather", "ulysses"]:
    """Return the communication method of the context-parallel ranks, with ``auto`` resolved.

    ``auto`` selects Ulysses if the context-parallel ranks can equally divide the key-value heads of
    a tensor-parallel rank. Otherwise it selects the ring.
    """
    parallel = recipe.parallel
    if parallel.context_communication != "auto":
        return parallel.context_communication
    heads = recipe.model.attention.num_kv_heads // parallel.tensor
    return "ring" if heads % parallel.context else "ulysses"


def check_ranks(world_size: int) -> None:
    """Refuse a number of ranks outside the supported range."""
    if not 1 <= world_size <= MAX_WORLD_SIZE:
        raise UserError(
            f"{shorten(str(world_size))} ranks cannot be started; give 1 to {MAX_WORLD_SIZE}"
        )


def _check_tensor(recipe: RecipeSections) -> None:
    tensor = recipe.parallel.tensor
    model = recipe.model
    sharded = {
        # A rank holds complete key-value heads with all query heads that use them.
        "model.attention.num_kv_heads": model.attention.num_kv_heads,
        "model.ffn_hidden_size": model.ffn_hidden_size,
        "model.vocab_size": model.vocab_size,
    }
    if recipe.parallel.sequence_parallel:
        sharded["training.seq_length"] = recipe.training.seq_length
    for name, size in sharded.items():
        if size % tensor:
            common = math.gcd(*sharded.values())
            raise ValueError(
                f"{name} {size} is not a multiple of parallel.tensor {tensor}; the nearest "
                f"tensor-parallel size that divides all it shards is "
                f"{_nearest_divisor(common, tensor)} of {shorten(str(divisors(common)))}"
            )


def _check_context(recipe: RecipeSections) -> None:
    """Check that context-parallel ranks can divide the sequence, and with Ulysses the heads."""
    parallel, length = recipe.parallel, recipe.training.seq_length
    if parallel.context == 1:
        return
    shards = parallel.tensor if parallel.sequence_parallel else 1
    pieces = 2 * parallel.context * shards
    if length % pieces:
        halves = 2 * shards
        fits = 1 if length % halves else _nearest_divisor(length // halves, parallel.context)
        nearest = max(1, round(length / pieces)) * pieces
        over = f" x parallel.tensor {shards}" if shards > 1 else ""
        raise ValueError(
            f"training.seq_length {length} is not a multiple of 2 x parallel.context "
            f"{parallel.context}{over}; the nearest length is {nearest}, the nearest "
            f"context-parallel size for this length {fits}"
        )
    heads = recipe.model.attention.num_kv_heads // parallel.tensor
    if parallel.context_communication == "ulysses" and heads % parallel.context:
        fits = _nearest_divisor(heads, parallel.context)
        raise ValueError(
            f"parallel.context_communication 'ulysses' divides the {heads} key-value heads of a "
            f"tensor-parallel rank among parallel.context {parallel.context} ranks, which leaves a "
            f"remainder; the nearest size is {fits}, and 'ring' works with any"
        )


def _check_ring(recipe: RecipeSections) -> None:
    backend = recipe.training.attention_backend
    # Layers with one map ignored the backend before, so recipes of old checkpoints may name any. A
    # network of such a recipe is refused when it is built, but the checkpoints can be exported.
    has_two_maps = any(each.operation == "differential" for each in recipe.model.attention.kinds)
    if (
        recipe.parallel.context > 1
        and choose_context_communication(recipe) == "ring"
        and has_two_maps
        and backend in whole_sequence_backends("differential")
    ):
        raise ValueError(
            f"training.attention_backend {backend!r} needs whole sequences, and "
            f"parallel.context {recipe.parallel.context} by 'ring' splits them; give 'auto' "
            "or 'triton', or parallel.context_communication 'all_gather'"
        )


def _check_pipeline(recipe: RecipeSections) -> None:
    parallel, layers = recipe.parallel, recipe.model.num_layers
    virtual_stages = parallel.pipeline * parallel.virtual_pipeline
    if layers % parallel.pipeline:
        raise ValueError(
            f"model.num_layers {layers} is not a multiple of parallel.pipeline "
            f"{parallel.pipeline}; the nearest pipeline size that divides it is "
            f"{_nearest_divisor(layers, parallel.pipeline)}"
        )
    if layers % virtual_stages:
        per_stage = layers // parallel.pipeline
        raise ValueError(
            f"model.num_layers {layers} is not a multiple of parallel.pipeline "
            f"{parallel.pipeline} x parallel.virtual_pipeline {parallel.virtual_pipeline}; the "
            "nearest number of virtual stages per rank is "
            f"{_nearest_divisor(per_stage, parallel.virtual_pipeline)}"
        )


def _check_recompute(recipe: RecipeSections) -> None:
    """Check that ``recompute.layers`` fits the number of layers of a virtual stage."""
    recompute, parallel = recipe.recompute, recipe.parallel
    layers = recipe.model.num_layers // (parallel.pipeline * parallel.virtual_pipeline)
    if recompute.granularity != "full":
        return
    if recompute.method == "block" and recompute.layers > layers:
        raise ValueError(
            f"recompute.layers {recompute.layers} is more than the {layers} layers of a virtual "
            f"pipeline stage; give at most {layers}"
        )
    if recompute.method == "uniform" and layers % recompute.layers:
        raise ValueError(
            f"recompute.layers {recompute.layers} does not divide the {layers} layers of a "
            "virtual pipeline stage into equal groups; the nearest that does is "
            f"{_nearest_divisor(layers, recompute.layers)}"
        )


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(divisors(number), key=lambda n: (abs(n - wanted), n))
