"""Communication of a rank per training step, by kind: bytes sent and number of collectives.

Bytes are counted for ring algorithms. An all-gather or reduce-scatter of n bytes over k ranks
sends n * (k - 1) / k bytes per rank, and an all-reduce twice as many.
"""

import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

from diffmegatron.attention.context_parallel.chunk_numbers import chunks_before, seen_chunks
from diffmegatron.attention.kinds.kind import AttentionKind, reads_hidden, window_in
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import EMBEDDING
from diffmegatron.config.trainable_patterns import is_trained
from diffmegatron.model.accounting import muon
from diffmegatron.model.accounting.activations import (
    BYTES,
    FLOAT32,
    context_communication,
    local_tokens,
    loss_chunks,
    output_weight,
)
from diffmegatron.model.accounting.memory import REDUCE_BUCKET, trained_parameters
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.model.accounting.zero_3 import count_gathers

# Number of modules in a layer that have weights: four projections, two norms and the attention.
_MODULES_PER_LAYER = 7


@dataclass(frozen=True)
class Traffic:
    """Communication of a rank per step, by kind: either bytes sent or numbers of collectives.

    Attributes:
        tensor: mainly hidden states and their gradients.
        context: keys and values; with ulysses also queries and outputs. Gradients are included.
        pipeline: hidden states, their gradients, and the gradient of a tied embedding.
        gradients: gradients that ZeRO reduces over data-parallel and context-parallel ranks.
        weights: weights that ZeRO gathers over data-parallel and context-parallel ranks.
        muon: momentum of matrices to their owners, and Muon's updates back.
    """

    tensor: int
    context: int
    pipeline: int
    gradients: int
    weights: int
    muon: int = 0

    @property
    def total(self) -> int:
        """Sum over all kinds of communication."""
        return sum(asdict(self).values())


def count_traffic(recipe: Recipe, world_size: int) -> Traffic:
    """Return the bytes that a rank sends per step, in the pipeline stage that sends most."""
    return stage_traffic(recipe, world_size, busiest_stage(recipe, world_size))


def busiest_stage(recipe: Recipe, world_size: int) -> int:
    """Return the number, from 0, of the pipeline stage whose ranks send most bytes per step."""
    stages = recipe.parallel.pipeline
    # The stages between the first and the last usually send equally many bytes, so try one.
    some = sorted({0, stages // 2, stages - 1})
    return max(some, key=lambda stage: stage_traffic(recipe, world_size, stage).total)


def stage_traffic(recipe: Recipe, world_size: int, stage: int) -> Traffic:
    """Return the bytes that a rank of a pipeline stage sends per step, by kind."""
    shards = recipe.data_parallel(world_size) * recipe.parallel.context
    microbatches = recipe.num_microbatches(world_size)
    gradients, weights = _zero(recipe, stage, shards, microbatches)
    return Traffic(
        tensor=round(microbatches * _tensor(recipe, stage)),
        context=round(microbatches * _context(recipe)),
        pipeline=round(microbatches * _pipeline(recipe, stage) + _tied(recipe, stage)),
        gradients=round(gradients),
        weights=round(weights),
        muon=round(muon.sent_bytes(recipe, world_size, stage)),
    )


def stage_collectives(recipe: Recipe, world_size: int, stage: int) -> Traffic:
    """Return the number of collectives that a rank of a pipeline stage calls per step, by kind.

    Messages of the pipeline count as collectives. ``gradients`` and ``weights`` are estimates.
    """
    parallel, model = recipe.parallel, recipe.model
    microbatches = recipe.num_microbatches(world_size)
    is_last = stage == parallel.pipeline - 1
    tensor = 0.0
    if parallel.tensor > 1:
        # An all-reduce counts as two transfers in _hidden_states_sent.
        per_collective = 1 if parallel.sequence_parallel else 2
        tensor = _hidden_states_sent(recipe, stage) / per_collective
        if is_last:
            chunks = loss_chunks(recipe)
            tensor += (chunks - 1) * _output_transfers(recipe) / per_collective
            # Cross-entropy has two all-reduces: one of the largest logits, and one of the sums of
            # exponentials and the labels' logits. With chunks, the backward pass repeats both.
            tensor += 2 * chunks * (1 if recipe.training.loss_chunk is None else 2)
    layers = model.num_layers / parallel.pipeline
    communication, passes = context_communication(recipe), attention_passes(recipe)
    context = 0.0
    if communication == "ring":
        for kind, count in counted_kinds(model):
            ring = _ring_messages(recipe, kind)
            each = passes * ring.exchanges + ring.backward_exchanges
            context += count / parallel.pipeline * each
    elif communication is not None:
        # Ulysses has two collectives per forward pass: one of q, k and v, and one of the outputs.
        # All-gather has one, of k and v. A backward pass has as many as a forward pass.
        context = layers * (passes + 1) * (2 if communication == "ulysses" else 1)
    elements = sum(trained_parameters(recipe, stage))
    rounds = len(muon.muon_rounds(recipe, world_size, stage))
    gradients = weights = 0.0
    if world_size > parallel.model_ranks or parallel.context > 1:
        buckets = -(-elements // REDUCE_BUCKET)
        gradients = buckets * (1 if parallel.zero_stage < 2 else microbatches)
        # ZeRO 1 and 2 gather two parameter groups, or three with Muon. ZeRO 3 gathers each module
        # in the forward and in the backward pass.
        weights = 3.0 if rounds else 2.0
        if parallel.zero_stage == 3:
            weights = 2 * microbatches * (layers * _MODULES_PER_LAYER + 2)
    tied = 1 if _tied(recipe, stage) else 0
    return Traffic(
        tensor=round(microbatches * tensor),
        context=round(microbatches * context),
        pipeline=round(microbatches * _messages(recipe, stage)) + tied,
        gradients=round(gradients),
        weights=round(weights),
        muon=2 * rounds if muon.stage_ranks(recipe, world_size) > 1 else 0,
    )


def forward_passes(recipe: Recipe) -> int:
    """Return the number of forward passes of a layer per microbatch: 2 with full recomputation."""
    return 2 if recipe.recompute.granularity == "full" else 1


def attention_passes(recipe: Recipe) -> int:
    """Return the number of forward passes of the core attention per microbatch."""
    return 1 if recipe.recompute.granularity == "none" else 2


def _hidden_state(recipe: Recipe) -> int:
    """Return the bytes of a microbatch's hidden states on one context-parallel rank."""
    element = BYTES[recipe.training.precision]
    return element * recipe.model.hidden_size * local_tokens(recipe)


def _tensor(recipe: Recipe, stage: int) -> float:
    """Return the bytes per microbatch that a rank sends for tensor parallelism."""
    size = recipe.parallel.tensor
    sent = _hidden_states_sent(recipe, stage) * _hidden_state(recipe) + _gates(recipe)
    return (size - 1) / size * sent


def _gates(recipe: Recipe) -> float:
    """Return n, where each of k tensor-parallel ranks sends n * (k - 1) / k bytes per microbatch.

    DIFF V2's projection of hidden states to lambda sends these bytes under sequence parallelism.
    """
    model, parallel = recipe.model, recipe.parallel
    if not parallel.sequence_parallel:
        return 0.0
    rows = local_tokens(recipe) / parallel.tensor
    elements = sum(
        count * (math.prod(each.shape) + each.shape[0] * rows)
        for kind, count in counted_kinds(model)
        if reads_hidden(kind)
        for each in kind.parameters(model.hidden_size)
        if each.role == "matrix"
    )
    passes = forward_passes(recipe) + 1
    return BYTES[recipe.training.precision] * passes * elements / parallel.pipeline


def _hidden_states_sent(recipe: Recipe, stage: int) -> int:
    """Return how often tensor parallelism transfers a microbatch's hidden states in a stage.

    An all-gather or a reduce-scatter counts once, an all-reduce twice.
    """
    parallel = recipe.parallel
    layers = recipe.model.num_layers // parallel.pipeline
    forward = backward = 4
    # The embedding's all-reduce counts as two. Sequence parallelism has a reduce-scatter instead,
    # and an all-gather in the backward pass of a trained embedding.
    edges = 2 if stage == 0 else 0
    if parallel.sequence_parallel:
        backward += is_trained(recipe, "linear_qkv.weight") + is_trained(
            recipe, "linear_fc1.weight"
        )
        if stage == 0:
            edges -= not is_trained(recipe, EMBEDDING)
    if stage == parallel.pipeline - 1:
        edges += _output_transfers(recipe)
    return layers * (forward_passes(recipe) * forward + backward) + edges


def _output_transfers(recipe: Recipe) -> int:
    """Return how often the output layer transfers a microbatch's hidden states."""
    if not recipe.parallel.sequence_parallel:
        return 2
    # The backward pass gathers the hidden states again for the gradient of the weight, and with
    # chunks for the logits.
    gathers_again = output_weight(recipe) > 0 or recipe.training.loss_chunk is not None
    return 2 + gathers_again


def _context(recipe: Recipe) -> float:
    """Return the bytes per microbatch that a rank sends for context parallelism."""
    model, parallel = recipe.model, recipe.parallel
    size, communication = parallel.context, context_communication(recipe)
    if communication is None:
        return 0.0
    element, tokens = BYTES[recipe.training.precision], local_tokens(recipe)
    total = 0.0
    for kind, count in counted_kinds(model):
        heads = kind.heads
        pair = 2 * tokens * heads.key_channels / parallel.tensor
        if communication == "ulysses":
            # A softmax kernel returns each attention map's output. Others return the difference.
            is_softmax = kind.operation == "softmax"
            results = heads.query_channels if is_softmax else heads.output_channels
            others = tokens * (heads.query_channels + results) / parallel.tensor
            forward = backward = element * (pair + others) * (size - 1) / size
        else:
            forward = backward = element * pair * (size - 1)
            if communication == "ring":
                ring = _ring_messages(recipe, kind)
                forward = backward = element * pair * ring.shards
                backward += FLOAT32 * pair * ring.gradient_shards
        total += count * (attention_passes(recipe) * forward + backward)
    return total / parallel.pipeline


class _RingMessages(NamedTuple):
    """Messages of one microbatch in a layer, of the rank of a ring that sends most.

    Attributes:
        shards: shards of keys and values that a pass sends.
        gradient_shards: shards of float32 gradients that a backward pass sends.
        exchanges, backward_exchanges: calls that send or receive, in a forward and a backward pass.
    """

    shards: float
    gradient_shards: float
    exchanges: int
    backward_exchanges: int


def _ring_messages(recipe: Recipe, kind: AttentionKind) -> _RingMessages:
    size, length = recipe.parallel.context, recipe.training.seq_length
    window = window_in(kind, length)
    if window is None:
        # Gradients of keys and values take one step more than keys and values.
        return _RingMessages(size - 1, size, size - 1, 2 * size - 1)
    before = chunks_before(window, length // (2 * size), size)
    of_ranks = []
    for rank in range(size):
        hops = [
            (
                len(seen_chunks(rank, (rank + hop) % size, size, before)),
                len(seen_chunks((rank - hop) % size, rank, size, before)),
            )
            for hop in range(1, size)
        ]
        leaving, arriving = (sum(each) / 2 for each in zip(*hops, strict=True))
        calls = sum(any(each) for each in hops)
        of_ranks.append(_RingMessages(leaving, arriving, calls, 2 * calls))

    def sent(each: _RingMessages) -> float:
        passes = attention_passes(recipe) + 1
        kept = passes * BYTES[recipe.training.precision] * each.shards
        return kept + FLOAT32 * each.gradient_shards

    return max(of_ranks, key=sent)


def _pipeline(recipe: Recipe, stage: int) -> float:
    """Return the bytes per microbatch that a rank sends to other pipeline stages."""
    parallel = recipe.parallel
    shards = parallel.tensor if parallel.sequence_parallel else 1
    return _messages(recipe, stage) * _hidden_state(recipe) / shards


def _messages(recipe: Recipe, stage: int) -> int:
    """Return the number of messages per microbatch that a rank sends to other pipeline stages."""
    parallel = recipe.parallel
    if parallel.pipeline == 1:
        return 0
    return 2 * parallel.virtual_pipeline - (1 if stage in (0, parallel.pipeline - 1) else 0)


def _tied(recipe: Recipe, stage: int) -> float:
    """Return the bytes per step that a rank sends to reduce a tied embedding's gradient.

    Pipeline parallelism requires ZeRO 1, so the gradient is float32.
    """
    model, parallel = recipe.model, recipe.parallel
    if not model.tied_embeddings or stage not in (0, parallel.pipeline - 1):
        return 0.0
    if parallel.pipeline == 1 or not is_trained(recipe, EMBEDDING):
        return 0.0
    return FLOAT32 * model.vocab_size * model.hidden_size / parallel.tensor


def _zero(recipe: Recipe, stage: int, shards: int, microbatches: int) -> tuple[float, float]:
    """Return the bytes per step that a rank sends for ZeRO, as (gradients, weights).

    ZeRO 1 all-reduces float32 gradients once per step. In every microbatch, ZeRO 2 all-reduces and
    ZeRO 3 reduce-scatters gradients in the run's precision. ZeRO 1 and 2 gather the updated weights
    once per step. ZeRO 3 instead gathers weights in every microbatch.
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
