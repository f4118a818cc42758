"""Parameters, FLOPs and memory of a recipe by arithmetic alone: no torch, no process, no GPU.

Parameters are those of the network as built. FLOPs are the model's, for both twins the least that
their mathematics needs; recomputation is not counted. Of memory, weights, gradients and optimizer
state are what DeepSpeed 0.19.8 allocates; activations and logits are estimates of what the layers
keep on a GPU for the backward pass, kernels' workspaces and the allocator's waste left out.
"""

from dataclasses import dataclass, fields

from diffmegatron.config.schema import ModelConfig, Recipe

BYTES = {"bf16": 2, "fp32": 4}
FLOAT32 = 4

# DeepSpeed's default reduce_bucket_size (runtime/zero/config.py), in elements.
REDUCE_BUCKET = 50_000_000


@dataclass(frozen=True)
class Accelerator:
    """A GPU: peak dense bf16 FLOP/s (no structured sparsity) and nominal memory in GiB."""

    peak_flops: float
    memory_gib: float


# NVIDIA's data sheets of A100 80GB, H100, H200 and HGX B200; they print most rates with sparsity,
# which is twice the dense rate. Longer names first: "H100 PCIe" is not the H100 that SXM means.
ACCELERATORS = {
    "H100 PCIe": Accelerator(756e12, 80),
    "H100 NVL": Accelerator(835e12, 94),
    "A100": Accelerator(312e12, 80),
    "H100": Accelerator(989e12, 80),
    "H200": Accelerator(989e12, 141),
    "B200": Accelerator(2250e12, 180),
}


@dataclass(frozen=True)
class Parameters:
    """Parameters of the whole network by part; ``output`` is 0 where it is the embedding."""

    embedding: int
    attention: int
    lambda_vectors: int
    headwise_norms: int
    norms: int
    mlp: int
    output: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def without_embeddings(self) -> int:
        """Without embedding and output layer."""
        return self.total - self.embedding - self.output


@dataclass(frozen=True)
class Flops:
    """Model FLOPs per token: forward, and forward with backward."""

    forward: float
    training: float


@dataclass(frozen=True)
class StageMemory:
    """Bytes that each rank of a pipeline stage holds at the height of the backward pass.

    ``weights``, ``gradients``, ``optimizer`` (master weights and Adam's moments) and
    ``communication`` (the bucket that gradients are reduced in) are DeepSpeed's allocations;
    ``activations`` and ``logits`` are estimates.
    """

    stage: int
    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All parts, an estimate."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.stage


def count_parameters(model: ModelConfig) -> Parameters:
    """Parameters of the network as ``build_model`` builds it."""
    layers, vocabulary = model.num_layers, model.vocab_size * model.hidden_size
    return Parameters(
        embedding=vocabulary,
        attention=layers * _attention_weights(model),
        lambda_vectors=layers * _lambda_weights(model),
        headwise_norms=layers * _headwise_norm_weights(model),
        norms=(2 * layers + 1) * model.hidden_size,
        mlp=layers * _mlp_weights(model),
        output=0 if model.tied_embeddings else vocabulary,
    )


def count_flops(model: ModelConfig, seq_length: int) -> Flops:
    """Model FLOPs per token of causal training on sequences of ``seq_length``.

    Matrix products: 2 FLOPs per weight and token forward, 4 backward, the output layer included.
    Attention: the same for both twins. Per (query, key) pair and differential head, or two heads
    of the Transformer, 4d multiply-adds forward (two scores of d; the maps combined, or their
    two outputs, with V: 2d) and 8d backward, scores not computed again; a query meets half the
    sequence on average. Kernels that keep the maps apart do more than this, which counts against
    their utilization.
    """
    weights = model.num_layers * (_attention_weights(model) + _mlp_weights(model))
    weights += model.vocab_size * model.hidden_size
    pairs = model.num_layers * model.num_heads * seq_length / 2
    attention = 2 * pairs * 4 * model.head_dim
    return Flops(forward=2 * weights + attention, training=6 * weights + 3 * attention)


def find_accelerator(device_name: str) -> Accelerator | None:
    """The GPU that CUDA calls ``device_name``, such as ``NVIDIA H100 80GB HBM3``; None: unknown."""
    return next((gpu for name, gpu in ACCELERATORS.items() if name in device_name), None)


def model_flops_utilization(
    tokens_per_second: float, flops_per_token: float, num_gpus: int, accelerator: Accelerator
) -> float:
    """Share of the GPUs' peak that the model's FLOPs use (PaLM, arXiv 2204.02311, appendix B).

    Args:
        tokens_per_second: of the whole run.
        flops_per_token: ``count_flops(...).training``.
        num_gpus: GPUs of the run.
        accelerator: what they are.
    """
    return tokens_per_second * flops_per_token / (num_gpus * accelerator.peak_flops)


def memory_by_stage(recipe: Recipe, world_size: int) -> tuple[StageMemory, ...]:
    """Memory of a rank of each pipeline stage.

    Raises:
        UserError: ``world_size`` does not fill the layout.
    """
    data_parallel = recipe.data_parallel(world_size)
    microbatches = recipe.num_microbatches(world_size)
    return tuple(
        _stage_memory(recipe, stage, data_parallel, microbatches)
        for stage in range(recipe.parallel.pipeline)
    )


def _attention_weights(model: ModelConfig) -> int:
    """Of a layer: queries and output are 2h heads of d wide, keys and values 2 h_kv."""
    heads = 2 * model.num_attention_heads + 2 * model.num_query_groups
    return heads * model.head_dim * model.hidden_size


def _mlp_weights(model: ModelConfig) -> int:
    return 3 * model.hidden_size * model.ffn_hidden_size


def _lambda_weights(model: ModelConfig) -> int:
    return 4 * model.head_dim if model.is_differential else 0


def _headwise_norm_weights(model: ModelConfig) -> int:
    return model.head_norm_dim if model.has_headwise_norm else 0


def _stage_memory(recipe: Recipe, stage: int, data_parallel: int, microbatches: int) -> StageMemory:
    """One stage's memory; the few elements that align ZeRO's partitions are left out.

    bf16 ZeRO 1 is DeepSpeed's BF16_Optimizer (runtime/bf16_optimizer.py), whose float32 gradient
    buffer holds the whole rank's gradients and is not partitioned. Everything else is its
    DeepSpeedZeroOptimizer (runtime/zero/stage_1_and_2.py): stage 1 keeps the gradients whole,
    stage 2 its partition of them in float32, and both reduce through a bucket.
    """
    low, high = _rank_parameters(recipe, stage)
    precision, zero = recipe.training.precision, recipe.parallel.zero_stage
    is_bf16_optimizer = precision == "bf16" and zero == 1
    shards = data_parallel if zero == 2 else 1
    return StageMemory(
        stage=stage,
        weights=BYTES[precision] * low + FLOAT32 * high,
        gradients=FLOAT32 * (low + high) // shards,
        optimizer=3 * FLOAT32 * (low + high) // data_parallel,
        communication=0 if is_bf16_optimizer else BYTES[precision] * REDUCE_BUCKET,
        activations=_activations(recipe, stage, microbatches),
        logits=_logits(recipe) if stage == recipe.parallel.pipeline - 1 else 0,
    )


def _rank_parameters(recipe: Recipe, stage: int) -> tuple[int, int]:
    """Parameters of a rank of ``stage``: in the run's precision, and always in float32."""
    model, parallel = recipe.model, recipe.parallel
    is_first, is_last = stage == 0, stage == parallel.pipeline - 1
    layers = model.num_layers // parallel.pipeline
    matrices = layers * (_attention_weights(model) + _mlp_weights(model))
    # A tied embedding is held by the first and by the last stage, once where they are one.
    vocabularies = 1 if is_first and is_last and model.tied_embeddings else is_first + is_last
    matrices += vocabularies * model.vocab_size * model.hidden_size
    norms = (2 * layers + is_last) * model.hidden_size
    kept_in_float32 = layers * (_lambda_weights(model) + _headwise_norm_weights(model))
    return matrices // parallel.tensor + norms, kept_in_float32


def _activations(recipe: Recipe, stage: int, microbatches: int) -> int:
    """Bytes the layers of ``stage`` keep for the backward pass, without recomputation.

    The 1F1B schedule holds as many microbatches as there are stages from this one on.
    """
    parallel, training = recipe.parallel, recipe.training
    in_flight = min(microbatches, parallel.pipeline - stage)
    layers = recipe.model.num_layers // parallel.pipeline
    tokens = training.micro_batch_size * training.seq_length
    kept = layers * (tokens * _layer_bytes_per_token(recipe) + _rotary_bytes(recipe))
    if stage == parallel.pipeline - 1:
        kept += tokens * _norm_and_projection_input(recipe)
    return round(in_flight * kept)


def _layer_bytes_per_token(recipe: Recipe) -> float:
    """What one layer keeps of one token: inputs of norms and projections, attention, SwiGLU."""
    element, tensor = BYTES[recipe.training.precision], recipe.parallel.tensor
    # SwiGLU keeps gate and up projection, fc2 its input.
    mlp = 3 * element * recipe.model.ffn_hidden_size / tensor
    return 2 * _norm_and_projection_input(recipe) + _attention_bytes_per_token(recipe) + mlp


def _norm_and_projection_input(recipe: Recipe) -> float:
    """A fused RMSNorm keeps its input and one float32 per token, the projection after it its own.

    Sequence parallelism shards both, as Megatron-core gathers the sequence again in the backward.
    """
    shards = recipe.parallel.tensor if recipe.parallel.sequence_parallel else 1
    element = BYTES[recipe.training.precision]
    return (2 * element * recipe.model.hidden_size + FLOAT32) / shards


def _attention_bytes_per_token(recipe: Recipe) -> float:
    """Between the qkv projection and the output projection, the latter's input included.

    Differential: q, k and v, which the backward starts again from. Softmax: q and k after
    rotation, the fused projection that v is a view of, the output (which is also the output
    projection's input) and one log-sum-exp per head.
    """
    model, element = recipe.model, BYTES[recipe.training.precision]
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_query_groups * model.head_dim
    if model.is_differential:
        kept = element * (2 * queries + 2 * keys)
    else:
        kept = element * (3 * queries + 3 * keys) + FLOAT32 * model.num_attention_heads
    if model.has_headwise_norm:
        kept += _headwise_norm_bytes_per_token(model, element)
    return kept / recipe.parallel.tensor


def _headwise_norm_bytes_per_token(model: ModelConfig, element: int) -> int:
    """The norm's float32 input and one float32 per head.

    The softmax kernel keeps its own output, which in float32 is that input, so that the output
    projection's becomes another tensor.
    """
    channels = model.num_attention_heads * model.head_dim
    if model.is_differential:
        return FLOAT32 * (channels + model.num_heads)
    copy = 0 if element == FLOAT32 else FLOAT32 * channels
    return copy + element * channels + FLOAT32 * model.num_attention_heads


def _rotary_bytes(recipe: Recipe) -> int:
    """Sines and cosines for q and for k, which every layer keeps once per position."""
    element = BYTES[recipe.training.precision]
    return 4 * element * recipe.model.head_dim * recipe.training.seq_length


def _logits(recipe: Recipe) -> int:
    """Vocabulary-parallel cross-entropy: float32 probabilities, and in bf16 the logits as well."""
    training = recipe.training
    tokens = training.micro_batch_size * training.seq_length
    per_logit = FLOAT32 if training.precision == "fp32" else FLOAT32 + BYTES["bf16"]
    return per_logit * tokens * recipe.model.vocab_size // recipe.parallel.tensor
