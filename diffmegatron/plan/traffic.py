"""Bytes that a rank sends per step, by kind, counted for ring algorithms.

An all-gather or reduce-scatter of n bytes over k ranks sends n (k - 1) / k from each, an all-reduce
twice that.
"""

from dataclasses import asdict, dataclass

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting import rank_parameters, trained_parameters
from diffmegatron.model.accounting.activations import (
    BYTES,
    FLOAT32,
    context_communication,
    local_tokens,
)
from diffmegatron.model.accounting.parameters import counted_kinds


@dataclass(frozen=True)
class Traffic:
    """Bytes sent per step by a rank of the pipeline stage that sends most.

    ``tensor``: all-reduces of the hidden state, or with sequence parallelism all-gathers and
    reduce-scatters. ``context``: keys and values (ring, all-gather) or heads (ulysses).
    ``pipeline``: hidden states to the next stage and their gradients back. ``gradients`` and
    ``weights``: what ZeRO reduces and gathers over data x context parallel ranks.
    """

    tensor: int
    context: int
    pipeline: int
    gradients: int
    weights: int

    @property
    def total(self) -> int:
        """All kinds."""
        return sum(asdict(self).values())


def count_traffic(recipe: Recipe, world_size: int) -> Traffic:
    """Traffic of a recipe on ``world_size`` ranks.

    Raises:
        UserError: the ranks do not fill the layout, or the batch does not divide over them.
    """
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches = recipe.num_microbatches(world_size)
    gradients, weights = _zero(recipe, shards, microbatches)
    return Traffic(
        tensor=round(microbatches * _tensor(recipe)),
        context=round(microbatches * _context(recipe)),
        pipeline=round(microbatches * _pipeline(recipe)),
        gradients=round(gradients),
        weights=round(weights),
    )


def forward_passes(recipe: Recipe) -> int:
    """Times that a whole layer's forward pass runs per step: once more where it is recomputed."""
    return 2 if recipe.recompute.granularity == "full" else 1


def _hidden_state(recipe: Recipe) -> int:
    """A microbatch's hidden state on one context-parallel rank."""
    element = BYTES[recipe.training.precision]
    return element * recipe.model.hidden_size * local_tokens(recipe)


def _tensor(recipe: Recipe) -> float:
    """Per microbatch. In the backward pass sequence parallelism gathers the inputs once more."""
    parallel = recipe.parallel
    size, layers = parallel.tensor, recipe.model.num_layers // parallel.pipeline
    share = (size - 1) / size
    forward = 4
    backward = 6 if parallel.sequence_parallel else 4
    # The embedding sums forward, the output layer backward; a stage has both, or at most one.
    edges = 4 if parallel.pipeline == 1 else 2
    passes = layers * (forward_passes(recipe) * forward + backward) + edges
    return passes * share * _hidden_state(recipe)


def _context(recipe: Recipe) -> float:
    """Per microbatch."""
    model, parallel = recipe.model, recipe.parallel
    size, communication = parallel.context, context_communication(recipe)
    if communication is None:
        return 0.0
    element, tokens = BYTES[recipe.training.precision], local_tokens(recipe)
    again = 2 if recipe.recompute.granularity != "none" else 1
    total = 0.0
    for kind, count in counted_kinds(model):
        heads = kind.heads
        pair = 2 * tokens * heads.key_channels / parallel.tensor
        if communication == "ulysses":
            others = tokens * (heads.query_channels + heads.output_channels) / parallel.tensor
            forward = backward = element * (pair + others) * (size - 1) / size
        else:
            forward = backward = element * pair * (size - 1)
            if communication == "ring":
                # Gradients travel in float32 beside the keys and values, and return to their rank
                # at the end.
                backward += FLOAT32 * pair * size
        total += count * (again * forward + backward)
    return total / parallel.pipeline


def _pipeline(recipe: Recipe) -> float:
    """Per microbatch: a stage in the middle sends forward and backward, for each virtual stage."""
    parallel = recipe.parallel
    if parallel.pipeline == 1:
        return 0.0
    shards = parallel.tensor if parallel.sequence_parallel else 1
    directions = 1 if parallel.pipeline == 2 and parallel.virtual_pipeline == 1 else 2
    return directions * parallel.virtual_pipeline * _hidden_state(recipe) / shards


def _zero(recipe: Recipe, shards: int, microbatches: int) -> tuple[float, float]:
    """Gradients reduced and weights gathered, in the run's precision but for ZeRO 1's gradients.

    ZeRO 1 reduces once per step and in float32, 2 and 3 every microbatch; 1 and 2 gather the
    updated weights, 3 gathers all for each forward and each backward pass. Reductions are
    all-reduces but for ZeRO 3.
    """
    share, stages = (shards - 1) / shards, range(recipe.parallel.pipeline)
    trained = max(sum(trained_parameters(recipe, stage)) for stage in stages)
    size = share * BYTES[recipe.training.precision] * trained
    if recipe.parallel.zero_stage == 1:
        return 2 * share * FLOAT32 * trained, size
    if recipe.parallel.zero_stage == 2:
        return 2 * size * microbatches, size
    whole = max(sum(rank_parameters(recipe, stage)) for stage in stages)
    gathered = share * BYTES[recipe.training.precision] * whole
    return size * microbatches, 2 * gathered * microbatches
