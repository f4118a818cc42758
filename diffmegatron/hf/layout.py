"""The one table between our full (tensor parallel 1) weights and Hugging Face's.

A :class:`Rule` is a line of it: weights of ours, weights of theirs, and the rearrangement that
leads either way. :func:`to_hf` and :func:`from_hf` read the same lines.

**Heads.** With r = h / h_kv, Megatron's ``linear_qkv`` holds for each of 2 h_kv groups: r query
heads, one key head, one value head, d rows each (``megatron.core.transformer.attention``). The
groups 2j and 2j+1 are the two maps of differential KV head j; its value is both value heads, side
by side. DiffLlama (``transformers.models.diffllama``) keeps all heads of the first map before all
of the second, and the two halves of the values likewise: group 2j + m moves to m h_kv + j, and
the heads within a group stay in order. Llama takes the groups as they are. Rotary embeddings turn
halves of a head on both sides, so rows within a head stay too.

**Headwise norm.** DiffLlama's has no weight. What it scales goes straight into the output
projection, so the weight of channel c multiplies the columns that read channel c, in fp32.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from diffmegatron.config.schema import ModelConfig
from diffmegatron.errors import UserError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Rearrange = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Transform:
    """Rearrangements of the tensors of a rule, ``(model, *source) -> target``, in its order."""

    to_hf: Rearrange
    from_hf: Rearrange


@dataclass(frozen=True)
class Rule:
    """Names and shapes on both sides, how to get across, and whether bf16 is out of bounds."""

    ours: Shapes
    theirs: Shapes
    transform: Transform
    keep_fp32: bool = False


def _unchanged(model: ModelConfig, weight: Tensor) -> tuple[Tensor, ...]:
    return (weight,)


def _split_halves(model: ModelConfig, gate_up: Tensor) -> tuple[Tensor, ...]:
    return gate_up.chunk(2)


def _join_halves(model: ModelConfig, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat((gate, up)),)


def _maps(model: ModelConfig) -> int:
    return 2 if model.is_differential else 1


def _split_qkv(model: ModelConfig, qkv: Tensor) -> tuple[Tensor, ...]:
    queries = model.num_heads // model.num_kv_heads
    groups = qkv.reshape(-1, _maps(model), queries + 2, model.head_dim, model.hidden_size)
    parts = groups.transpose(0, 1).split((queries, 1, 1), dim=2)
    return tuple(part.reshape(-1, model.hidden_size) for part in parts)


def _join_qkv(model: ModelConfig, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    queries = model.num_heads // model.num_kv_heads
    parts = [
        part.reshape(_maps(model), -1, heads, model.head_dim, model.hidden_size)
        for part, heads in ((q, queries), (k, 1), (v, 1))
    ]
    return (torch.cat(parts, dim=2).transpose(0, 1).reshape(-1, model.hidden_size),)


def _fold_norm(model: ModelConfig, proj: Tensor, norm: Tensor) -> tuple[Tensor, ...]:
    return (proj.float() * norm.float().repeat(model.num_heads),)


def _unfold_norm(model: ModelConfig, proj: Tensor) -> tuple[Tensor, ...]:
    return proj, proj.new_ones(model.head_norm_dim)


UNCHANGED = Transform(_unchanged, _unchanged)
GATE_UP = Transform(_split_halves, _join_halves)
QKV = Transform(_split_qkv, _join_qkv)
HEADWISE_NORM = Transform(_fold_norm, _unfold_norm)


def table(model: ModelConfig) -> tuple[Rule, ...]:
    """Every weight of the model, in the order of the forward pass.

    Raises:
        UserError: the model is none that the Hugging Face class of its kind computes.
    """
    require_expressible(model)
    embedding, norm = (model.vocab_size, model.hidden_size), (model.hidden_size,)
    rules = [_same("embedding.word_embeddings", "model.embed_tokens", embedding)]
    for layer in range(model.num_layers):
        ours, theirs = f"decoder.layers.{layer}", f"model.layers.{layer}"
        rules += _attention(model, f"{ours}.self_attention", f"{theirs}.self_attn")
        rules += _mlp(model, f"{ours}.mlp", f"{theirs}.mlp")
        rules += [
            _same(f"{ours}.input_layernorm", f"{theirs}.input_layernorm", norm),
            _same(f"{ours}.pre_mlp_layernorm", f"{theirs}.post_attention_layernorm", norm),
        ]
    rules.append(_same("decoder.final_layernorm", "model.norm", norm))
    if not model.tied_embeddings:
        rules.append(_same("output_layer", "lm_head", embedding))
    return tuple(rules)


def _same(ours: str, theirs: str, shape: Shape) -> Rule:
    return Rule({f"{ours}.weight": shape}, {f"{theirs}.weight": shape}, UNCHANGED)


def _mlp(model: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    gate_up = {f"{theirs}.{part}_proj.weight": (ffn, hidden) for part in ("gate", "up")}
    return [
        Rule({f"{ours}.linear_fc1.weight": (2 * ffn, hidden)}, gate_up, GATE_UP),
        _same(f"{ours}.linear_fc2", f"{theirs}.down_proj", (hidden, ffn)),
    ]


def _attention(model: ModelConfig, ours: str, theirs: str) -> list[Rule]:
    hidden = model.hidden_size
    queries = model.num_attention_heads * model.head_dim
    keys = model.num_query_groups * model.head_dim
    qkv = {f"{ours}.linear_qkv.weight": (queries + 2 * keys, hidden)}
    parts = {
        f"{theirs}.q_proj.weight": (queries, hidden),
        f"{theirs}.k_proj.weight": (keys, hidden),
        f"{theirs}.v_proj.weight": (keys, hidden),
    }
    rules = [Rule(qkv, parts, QKV)]
    if not model.is_differential:
        return [*rules, _same(f"{ours}.linear_proj", f"{theirs}.o_proj", (hidden, queries))]
    proj_and_norm = {
        f"{ours}.linear_proj.weight": (hidden, queries),
        f"{ours}.core_attention.norm.weight": (model.head_norm_dim,),
    }
    rules.append(Rule(proj_and_norm, {f"{theirs}.o_proj.weight": (hidden, queries)}, HEADWISE_NORM))
    for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        mine, yours = f"{ours}.core_attention.{name}", f"{theirs}.{name}"
        vector = (model.head_dim,)
        # Rounding these vectors to bf16 would move lambda itself by up to 5e-3.
        rules.append(Rule({mine: vector}, {yours: vector}, UNCHANGED, keep_fp32=True))
    return rules


def require_expressible(model: ModelConfig) -> None:
    """Refuse what neither DiffLlama nor Llama computes.

    Raises:
        UserError: names the key of the recipe and what could be exported instead.
    """
    if model.is_differential and model.lambda_init.policy != "exponential":
        raise UserError(
            f"model.lambda_init.policy {model.lambda_init.policy!r} cannot be exported: Hugging "
            "Face's DiffLlama computes lambda_init by the policy 'exponential' alone"
        )
    if model.has_headwise_norm != model.is_differential:
        kind = "DiffLlama always has" if model.is_differential else "Llama never has"
        raise UserError(
            f"model.headwise_norm {model.has_headwise_norm} with model.attention "
            f"{model.attention!r} cannot be exported: Hugging Face's {kind} the headwise norm"
        )
    if not model.is_differential and model.hidden_size % model.num_attention_heads:
        raise UserError(
            f"model.hidden_size {model.hidden_size} with {model.num_attention_heads} attention "
            "heads cannot be exported: Hugging Face's Llama wants a multiple of the heads"
        )


def to_hf(weights: Weights, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Our weights as Hugging Face's, each as soon as all that it is made of has arrived.

    Args:
        weights: every weight of the model by name, whole (not a tensor-parallel shard), any order.
        model: the model the weights belong to.

    Yields:
        Name and tensor, in the dtype of the source; fp32 where the headwise norm was folded in.

    Raises:
        UserError: the model cannot be expressed; a weight is missing, unknown, twice there or of
            another shape.
    """
    lines = ((rule.ours, rule.theirs, rule.transform.to_hf) for rule in table(model))
    return _convert(weights, model, lines)


def from_hf(weights: Weights, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The way back of :func:`to_hf`, same terms; the headwise norm's weight comes back as ones."""
    lines = ((rule.theirs, rule.ours, rule.transform.from_hf) for rule in table(model))
    return _convert(weights, model, lines)


def _convert(
    weights: Weights, model: ModelConfig, lines: Iterable[tuple[Shapes, Shapes, Rearrange]]
) -> Iterator[tuple[str, Tensor]]:
    line_of = {name: line for line in lines for name in line[0]}
    missing = set(line_of)
    waiting: dict[str, Tensor] = {}
    for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
        if name not in missing:
            problem = "comes twice" if name in line_of else "is none of this model's"
            raise UserError(f"weight {name!r} {problem}; the recipe and the weights must agree")
        source, target, rearrange = line_of[name]
        if tuple(tensor.shape) != source[name]:
            raise UserError(
                f"weight {name!r} has shape {list(tensor.shape)}; the recipe makes it "
                f"{list(source[name])}"
            )
        missing.remove(name)
        waiting[name] = tensor
        if missing.isdisjoint(source):
            yield from zip(target, rearrange(model, *map(waiting.pop, source)), strict=True)
    if missing:
        raise UserError(
            f"{len(missing)} weights are missing, the first is {min(missing)!r}; "
            "the weights must be those of the whole model"
        )
