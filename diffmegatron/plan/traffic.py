"""Bytes that a rank sends per step, by kind, counted for ring algorithms.

In an all-gather or reduce-scatter of n bytes over k ranks, each rank sends n (k - 1) / k bytes. In
an all-reduce it sends twice as many.

Functions of this module raise UserError if the ranks do not fill the layout or the batch does not
divide over them.
"""

import math
from dataclasses import asdict, dataclass

from diffmegatron.config.schema import Recipe
from diffmegatron.config.trainable_patterns import trains_everything
from diffmegatron.model.accounting import REDUCE_BUCKET, trained_parameters
from diffmegatron.model.accounting.activations import (
    BYTES,
    FLOAT32,
    context_communication,
    local_tokens,
)
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.model.accounting.zero_3 import count_gathers

# Modules with weights of their own in a layer: four projections, two norms and the attention.
_MODULES_PER_LAYER = 7


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends per step, or the number of its collectives.

    Attributes:
        tensor: all-reduces of the hidden state, or with sequence parallelism all-gathers and
            reduce-scatters.
        context: keys and values (ring, all-gather) or heads (ulysses).
        pipeline: hidden states to the next stage, their gradients back, and the gradient of an
            embedding that the first and the last stage share.
        gradients: gradients that ZeRO reduces over data x context parallel ranks.
        weights: weights that ZeRO gathers over the same ranks.
    """

    tensor: int
    context: int
    pipeline: int
    gradients: int
    weights: int

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(asdict(self).values())


def count_traffic(recipe: Recipe, world_size: int) -> Traffic:
    """Return the traffic of a rank of the pipeline stage that sends most."""
    return stage_traffic(recipe, world_size, busiest_stage(recipe, world_size))


def busiest_stage(recipe: Recipe, world_size: int) -> int:
    """Return the pipeline stage whose ranks send most."""
    stages = recipe.parallel.pipeline
    # All stages between the first and the last send the same.
    some = sorted({0, stages // 2, stages - 1})
    return max(some, key=lambda stage: stage_traffic(recipe, world_size, stage).total)


def stage_traffic(recipe: Recipe, world_size: int, stage: int) -> Traffic:
    """Return the traffic of a rank of one pipeline stage."""
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches = recipe.num_microbatches(world_size)
    gradients, weights = _zero(recipe, stage, shards, microbatches)
    return Traffic(
        tensor=round(microbatches * _tensor(recipe, stage)),
        context=round(microbatches * _context(recipe)),
        pipeline=round(microbatches * _pipeline(recipe, stage) + _tied(recipe, stage)),
        gradients=round(gradients),
        weights=round(weights),
    )


def stage_collectives(recipe: Recipe, world_size: int, stage: int) -> Traffic:
    """Return the number of collectives that a rank of a stage calls per step.

    Messages of a pipeline count as collectives. ``gradients`` and ``weights`` are estimates that
    assume full buckets. Reductions of single numbers are not counted.
    """
    parallel, model = recipe.parallel, recipe.model
    microbatches = recipe.num_microbatches(world_size)
    is_last = stage == parallel.pipeline - 1
    tensor = 0.0
    if parallel.tensor > 1:
        # An all-reduce sends as many bytes as an all-gather and a reduce-scatter together.
        per_collective = 1 if parallel.sequence_parallel else 2
        tensor = _hidden_states_sent(recipe, stage) / per_collective
        # The cross-entropy reduces the largest logit, and the sums.
        tensor += 2 if is_last else 0
    layers = model.num_layers / parallel.pipeline
    again = 2 if recipe.recompute.granularity != "none" else 1
    communication = context_communication(recipe)
    context = 0.0
    if communication == "ring":
        context = layers * (again * (parallel.context - 1) + 2 * parallel.context - 1)
    elif communication is not None:
        # Ulysses exchanges q, k and v in one collective and the outputs in another. The
        # all-gather sends k and v in one. The gradients need as many.
        context = layers * (again + 1) * (2 if communication == "ulysses" else 1)
    elements = sum(trained_parameters(recipe, stage))
    gradients = weights = 0.0
    if world_size > parallel.model_ranks or parallel.context > 1:
        buckets = -(-elements // REDUCE_BUCKET)
        gradients = buckets * (1 if parallel.zero_stage < 2 else microbatches)
        # There are two groups of parameters. ZeRO 3 gathers each module, forward and backward.
        weights = 2.0
        if parallel.zero_stage == 3:
            weights = 2 * microbatches * (layers * _MODULES_PER_LAYER + 2)
    tied = 1 if _tied(recipe, stage) else 0
    return Traffic(
        tensor=round(microbatches * tensor),
        context=round(microbatches * context),
        pipeline=round(microbatches * _messages(recipe, stage)) + tied,
        gradients=round(gradients),
        weights=round(weights),
    )


def forward_passes(recipe: Recipe) -> int:
    """Return how often a layer's forward pass runs per microbatch: twice if it is recomputed."""
    return 2 if recipe.recompute.granularity == "full" else 1


def _hidden_state(recipe: Recipe) -> int:
    """Return the bytes of a microbatch's hidden state on one context-parallel rank."""
    element = BYTES[recipe.training.precision]
    return element * recipe.model.hidden_size * local_tokens(recipe)


def _tensor(recipe: Recipe, stage: int) -> float:
    """Return the bytes per microbatch."""
    size = recipe.parallel.tensor
    sent = _hidden_states_sent(recipe, stage) * _hidden_state(recipe) + _gates(recipe)
    return (size - 1) / size * sent


def _gates(recipe: Recipe) -> float:
    """Return the bytes per microbatch that attention's own products with hidden states send.

    These products (such as V2's lambda) are outside Megatron's projections.
    Sequence-parallel ranks gather the matrix, and exchange rows of the sequence for heads.
    """
    model, parallel = recipe.model, recipe.parallel
    if not parallel.sequence_parallel:
        return 0.0
    rows = local_tokens(recipe) / parallel.tensor
    elements = sum(
        count * (math.prod(each.shape) + each.shape[0] * rows)
        for kind, count in counted_kinds(model)
        if kind.reads_hidden
        for each in kind.parameters(model.hidden_size)
        if each.role == "matrix"
    )
    passes = forward_passes(recipe) + 1
    return BYTES[recipe.training.precision] * passes * elements / parallel.pipeline


def _hidden_states_sent(recipe: Recipe, stage: int) -> int:
    """Return how often tensor-parallel ranks gather or scatter a microbatch's hidden state.

    In the backward pass sequence parallelism gathers the inputs once more, also the input of the
    output layer. A loss in chunks computes the logits again and gathers its input for that.
    """
    parallel = recipe.parallel
    layers = recipe.model.num_layers // parallel.pipeline
    forward = 4
    backward = 6 if parallel.sequence_parallel else 4
    # The embedding reduces in the forward pass, the output layer in the backward pass.
    edges = 2 if stage == 0 else 0
    if stage == parallel.pipeline - 1:
        edges += 2
        if parallel.sequence_parallel:
            edges += 2 if recipe.training.loss_chunk else 1
    return layers * (forward_passes(recipe) * forward + backward) + edges


def _context(recipe: Recipe) -> float:
    """Return the bytes per microbatch."""
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
            # With softmax operations the heads are sent, and the kind combines them afterwards.
            is_softmax = kind.operation == "softmax"
            results = heads.query_channels if is_softmax else heads.output_channels
            others = tokens * (heads.query_channels + results) / parallel.tensor
            forward = backward = element * (pair + others) * (size - 1) / size
        else:
            forward = backward = element * pair * (size - 1)
            if communication == "ring":
                # Gradients travel in float32 beside the keys and values, and return to their rank
                # at the end.
                backward += FLOAT32 * pair * size
        total += count * (again * forward + backward)
    return total / parallel.pipeline


def _pipeline(recipe: Recipe, stage: int) -> float:
    """Return the bytes per microbatch."""
    parallel = recipe.parallel
    shards = parallel.tensor if parallel.sequence_parallel else 1
    return _messages(recipe, stage) * _hidden_state(recipe) / shards


def _messages(recipe: Recipe, stage: int) -> int:
    """Return the messages per microbatch: forward and backward for each virtual stage.

    The last virtual stage sends nothing forward, and the first sends nothing backward.
    """
    parallel = recipe.parallel
    if parallel.pipeline == 1:
        return 0
    return 2 * parallel.virtual_pipeline - (1 if stage in (0, parallel.pipeline - 1) else 0)


def _tied(recipe: Recipe, stage: int) -> float:
    """Return the bytes per step that reduce a tied embedding's gradient over its two stages.

    In an all-reduce of two ranks, each sends the gradient once. A pipeline requires ZeRO 1, which
    reduces float32.
    """
    model, parallel = recipe.model, recipe.parallel
    if not model.tied_embeddings or stage not in (0, parallel.pipeline - 1):
        return 0.0
    if parallel.pipeline == 1 or not trains_everything(recipe):
        return 0.0
    return FLOAT32 * model.vocab_size * model.hidden_size / parallel.tensor


def _zero(recipe: Recipe, stage: int, shards: int, microbatches: int) -> tuple[float, float]:
    """Return the bytes of gradients that are reduced and of weights that are gathered.

    ZeRO 1 reduces float32 gradients once per step. ZeRO 2 and 3 reduce gradients in the run's
    precision for every microbatch. ZeRO 1 and 2 gather the updated weights once, and ZeRO 3 gathers
    weights before their use (:mod:`diffmegatron.model.accounting.zero_3`). ZeRO 3 reduces by a
    reduce-scatter, the others by an all-reduce.
    """
    share = (shards - 1) / shards
    trained = sum(trained_parameters(recipe, stage))
    size = share * BYTES[recipe.training.precision] * trained
    if recipe.parallel.zero_stage == 1:
        return 2 * share * FLOAT32 * trained, size
    if recipe.parallel.zero_stage == 2:
        return 2 * size * microbatches, size
    gathered = share * BYTES[recipe.training.precision] * count_gathers(recipe).per_microbatch
    return size * microbatches, gathered * microbatches
