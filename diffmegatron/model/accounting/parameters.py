"""Numbers of parameters of a network."""

import math
from collections import Counter
from dataclasses import dataclass, fields

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.tensors import layer_number, layer_tensors, network_tensors
from diffmegatron.config.trainable_patterns import is_lora, trained_parts, trains_everything


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of the unsharded network.

    Attributes:
        attention: attention matrices with their biases, without LoRA.
        headwise_norms: attention's norms over the channels of a head.
        norms: norms over the hidden size, including the final norm.
        output: output layer; 0 if it is tied to the embedding.
    """

    embedding: int
    attention: int
    lambdas: int
    headwise_norms: int
    norms: int
    mlp: int
    lora: int
    output: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def without_embeddings(self) -> int:
        """Number of parameters except those of the embedding and the output layer."""
        return self.total - self.embedding - self.output


def count_parameters(model: ModelConfig) -> Parameters:
    """Count the parameters of the unsharded network that ``build_model`` builds."""
    vocabulary = model.vocab_size * model.hidden_size
    projections = lora = 0
    by_role: Counter[str] = Counter()
    for kind, count in counted_kinds(model):
        projections += count * projection_weights(model, kind)
        lora += count * lora_weights(model, kind)
        for each in kind.parameters(model.hidden_size):
            by_role[each.role] += count * math.prod(each.shape)
    return Parameters(
        embedding=vocabulary,
        attention=projections + by_role["matrix"] + by_role["bias"],
        lambdas=by_role["lambda"],
        headwise_norms=by_role["norm"],
        norms=(2 * model.num_layers + 1) * model.hidden_size,
        mlp=model.num_layers * mlp_weights(model),
        lora=lora,
        output=0 if model.tied_embeddings else vocabulary,
    )


def count_trained(recipe: Recipe) -> int:
    """Count the trained parameters of the unsharded network; frozen rows do not count."""
    model = recipe.model
    if trains_everything(recipe):
        return count_parameters(model).total
    count = 0
    for tensor in network_tensors(model):
        rows, *others = tensor.shape
        trained = trained_parts(tensor, recipe)
        if tensor.parts:
            heads = model.attention.of_layer(layer_number(tensor.name)).heads
            rows = sum(heads.channels(part) for part in trained)
        count += rows * math.prod(others) if trained else 0
    return count


def counted_kinds(model: ModelConfig) -> list[tuple[AttentionKind, int]]:
    """Return the kinds of attention in the network, each with its number of layers."""
    kinds = model.attention.by_kind(model.num_layers)
    return [(kind, sum(map(len, layers))) for kind, layers in kinds]


def projection_weights(model: ModelConfig, kind: AttentionKind) -> int:
    """Count the weights of a layer's ``linear_qkv`` and ``linear_proj``."""
    heads = kind.heads
    return (heads.qkv_channels + heads.output_channels) * model.hidden_size


def mlp_weights(model: ModelConfig) -> int:
    """Count the weights of a layer's gate, up and down projections."""
    return 3 * model.hidden_size * model.ffn_hidden_size


def lora_weights(model: ModelConfig, kind: AttentionKind) -> int:
    """Count the weights that LoRA adds to a layer."""
    return sum(math.prod(each.shape) for each in layer_tensors(model, kind) if is_lora(each.name))
