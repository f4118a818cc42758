"""Parameters and FLOPs of a network by arithmetic alone."""

from dataclasses import dataclass, fields

from diffmegatron.config.schema import ModelConfig


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


def count_parameters(model: ModelConfig) -> Parameters:
    """Parameters of the network as ``build_model`` builds it."""
    layers, vocabulary = model.num_layers, model.vocab_size * model.hidden_size
    return Parameters(
        embedding=vocabulary,
        attention=layers * attention_weights(model),
        lambda_vectors=layers * lambda_weights(model),
        headwise_norms=layers * headwise_norm_weights(model),
        norms=(2 * layers + 1) * model.hidden_size,
        mlp=layers * mlp_weights(model),
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
    weights = model.num_layers * (attention_weights(model) + mlp_weights(model))
    weights += model.vocab_size * model.hidden_size
    pairs = model.num_layers * model.num_heads * seq_length / 2
    attention = 2 * pairs * 4 * model.head_dim
    return Flops(forward=2 * weights + attention, training=6 * weights + 3 * attention)


def attention_weights(model: ModelConfig) -> int:
    """Of a layer: queries and output are 2h heads of d wide, keys and values 2 h_kv."""
    heads = 2 * model.num_attention_heads + 2 * model.num_query_groups
    return heads * model.head_dim * model.hidden_size


def mlp_weights(model: ModelConfig) -> int:
    """Of a layer: gate, up and down projection."""
    return 3 * model.hidden_size * model.ffn_hidden_size


def lambda_weights(model: ModelConfig) -> int:
    """Of a layer: four vectors of d."""
    return 4 * model.head_dim if model.is_differential else 0


def headwise_norm_weights(model: ModelConfig) -> int:
    """Of a layer: one weight per channel of a head."""
    return model.head_norm_dim if model.has_headwise_norm else 0
