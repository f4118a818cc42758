"""Conversion between the unsharded weights of our Megatron network and Hugging Face's weights.

RoPE rotates the same pairs of channels in both networks: i and i + d / 2 of a head with d channels.
The conversions therefore keep the order of the rows within a head.
"""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from diffmegatron.config.model_config import ModelConfig
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds import NetworkExport
from diffmegatron.hf.kinds.weight_rules import Rearrange, Shapes, WeightRule, same

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


def table(model: ModelConfig, step: int = 0) -> tuple[WeightRule, ...]:
    """Return the rules that convert all weights of a model after ``step`` training steps."""
    export = NetworkExport(model.attention, model.hidden_size, model.num_layers)
    export.hugging_face()  # Raises an error if the settings of a kind have no class.
    norm = (model.hidden_size,)
    rules = [_vocabulary(model, "embedding.word_embeddings", "model.embed_tokens")]
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        rules += export.rules(
            f"{ours}.self_attention", f"{theirs}.self_attn", layer=layer + 1, step=step
        )
        rules += _mlp(model, f"{ours}.mlp", f"{theirs}.mlp")
        rules += [
            _same(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", norm),
            _same(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", norm),
        ]
    rules.append(_same("decoder.final_layernorm", "model.norm", norm))
    if not model.tied_embeddings:
        rules.append(_vocabulary(model, "output_layer", "lm_head"))
    return tuple(rules)


def _vocabulary(model: ModelConfig, ours: str, theirs: str) -> WeightRule:
    """Return the rule of the embedding or the output layer, which have one row per token.

    Our matrix ends with ``vocab_padding`` unused rows. An import fills them with zeros, and an
    export removes them.
    """
    return WeightRule(
        {f"{ours}.weight": (model.vocab_size, model.hidden_size)},
        {f"{theirs}.weight": (model.tokens, model.hidden_size)},
        lambda weight: (weight[: model.tokens],),
        lambda weight: (torch.nn.functional.pad(weight, (0, 0, 0, model.vocab_padding)),),
    )


def _same(ours: str, theirs: str, shape: tuple[int, ...]) -> WeightRule:
    return same(f"{ours}.weight", f"{theirs}.weight", shape)


def _mlp(model: ModelConfig, ours: str, theirs: str) -> list[WeightRule]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    gate_up = {f"{theirs}.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
    return [
        WeightRule(
            {f"{ours}.linear_fc1.weight": (2 * ffn, hidden)},
            gate_up,
            lambda fused: fused.chunk(2),
            lambda gate, up: (torch.cat((gate, up)),),
        ),
        _same(f"{ours}.linear_fc2", f"{theirs}.down_proj", (hidden, ffn)),
    ]


def to_hf(weights: Weights, model: ModelConfig, step: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Convert our weights to Hugging Face's; yield the name and tensor of each result.

    A tensor is yielded as soon as all weights from which it is computed are read. It keeps their
    dtype. Exception: a product of several weights is float32 or float64.
    """
    lines = ((rule.ours, rule.theirs, rule.to_hf) for rule in table(model, step))
    return _convert(weights, lines)


def from_hf(weights: Weights, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Convert Hugging Face's weights to ours; yield the name and tensor of each of our weights.

    A weight that the Hugging Face model lacks gets a value without effect. For example, the weight
    of the headwise norm becomes ones, because DiffLlama's norm has no weight.
    """
    lines = ((rule.theirs, rule.ours, rule.from_hf) for rule in table(model))
    return _convert(weights, lines)


def _convert(
    weights: Weights, lines: Iterable[tuple[Shapes, Shapes, Rearrange]]
) -> Iterator[tuple[str, Tensor]]:
    line_of = {name: line for line in lines for name in line[0]}
    missing = set(line_of)
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if name not in missing:
            problem = "occurs twice" if name in line_of else "is not part of this model"
            raise UserError(f"weight {name!r} {problem}; the recipe and the weights must agree")
        source, target, rearrange = line_of[name]
        if tuple(tensor.shape) != source[name]:
            raise UserError(
                f"weight {name!r} has shape {list(tensor.shape)}; the recipe requires "
                f"{list(source[name])}"
            )
        missing.remove(name)
        waiting[name] = tensor
        if missing.isdisjoint(source):
            yield from zip(target, rearrange(*map(waiting.pop, source)), strict=True)
    if missing:
        raise UserError(
            f"{len(missing)} weights are missing, the first is {min(missing)!r}; "
            "the weights must be those of the whole model"
        )
