"""Tests of the table of weight names and layouts against equations of Ye et al. in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from diffmegatron.attention.kinds import KINDS
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.hf import weight_mapping as layout
from diffmegatron.hf.configuration import to_hf_config
from diffmegatron.hf.kinds.weight_rules import Rearrange, WeightRule
from diffmegatron.hf.weight_mapping import from_hf, to_hf
from diffmegatron.hf.write_export import logit_difference

DIFF = {"kind": "diff_v1"}
# With ``baseline``, softmax attention with twice the recipe's ``num_heads`` and ``num_kv_heads``
# replaces the differential attention.
SOFTMAX = {"baseline": True}
MHA = {"num_heads": 4}
GQA = {"num_heads": 6, "num_kv_heads": 2}
TIED = {"tied_embeddings": True}
FREE_HEAD_DIM = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 10}
END = 256


def make_recipe(**model: object) -> Recipe:
    """Return a recipe; ``model`` has keys of the sections ``model`` and ``model.attention``."""
    of_attention = {key for kind in KINDS.values() for key in kind.model_fields}
    attention = {"kind": "diff_v1", "num_heads": 6}
    attention |= {key: value for key, value in model.items() if key in of_attention}
    sizes = {"num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 40, "vocab_size": 264}
    sizes |= {key: value for key, value in model.items() if key not in of_attention}
    return Recipe.model_validate(
        {
            "run_dir": "run",
            "model": {**sizes, "rope_theta": 700.0, "attention": attention},
            "data": {"tokenizer": "bytes", "sources": [{"path": "corpus"}]},
            "training": {"seq_length": 64, "global_batch_size": 2, "steps": 4},
            "optimizer": {"lr": 1e-3},
        }
    )


def make_weights(model: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """Return random weights by Megatron's names; their attention maps are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    h, kv, d = model.attention.num_heads, model.attention.num_kv_heads, model.attention.head_dim
    is_differential = model.attention.kind == "diff_v1"
    maps = 2 if is_differential else 1
    weights: dict[str, Tensor] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        scale = 1.5 / math.sqrt(columns)
        weights[name] = torch.randn(rows, columns, generator=generator) * scale

    def norm(name: str, size: int) -> None:
        weights[name] = torch.rand(size, generator=generator) + 0.5

    matrix("embedding.word_embeddings.weight", model.vocab_size, hidden)
    for i in range(model.num_layers):
        layer = f"decoder.layers.{i}."
        norm(layer + "input_layernorm.weight", hidden)
        attention = layer + "self_attention."
        matrix(attention + "linear_qkv.weight", maps * (h + 2 * kv) * d, hidden)
        if is_differential:
            for part in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                weights[attention + part] = torch.randn(d, generator=generator) * 0.3
            if model.attention.kinds[0].headwise_norm:
                norm(attention + "head_norm", 2 * d)
        if model.attention.kinds[0].qk_norm:
            norm(attention + "q_norm", d)
            norm(attention + "k_norm", d)
        matrix(attention + "linear_proj.weight", hidden, maps * h * d)
        norm(layer + "pre_mlp_layernorm.weight", hidden)
        matrix(layer + "mlp.linear_fc1.weight", 2 * ffn, hidden)
        matrix(layer + "mlp.linear_fc2.weight", hidden, ffn)
    norm("decoder.final_layernorm.weight", hidden)
    if not model.tied_embeddings:
        matrix("output_layer.weight", model.vocab_size, hidden)
    return weights


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def rotate(x: Tensor, theta: float) -> Tensor:
    """Apply rotary embedding to one head [s, d]; the channels c and c + d/2 are a pair."""
    s, d = x.shape
    angle = torch.arange(s).double()[:, None] * theta ** (-torch.arange(0, d, 2).double() / d)
    one, two = x[:, : d // 2], x[:, d // 2 :]
    return torch.cat(
        (one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), dim=1
    )


def attention_map(q: Tensor, k: Tensor, theta: float, window: int | None) -> Tensor:
    scores = rotate(q, theta) @ rotate(k, theta).T / math.sqrt(q.shape[1])
    place = torch.arange(len(scores))
    distance = place[:, None] - place
    is_seen = (distance >= 0) & (distance < (window or len(scores)))
    return scores.masked_fill(~is_seen, -math.inf).softmax(-1)


def paper_logits(
    weights: dict[str, Tensor], model: ModelConfig, tokens: Tensor, first_layer: int = 1
) -> Tensor:
    """Return the logits of Ye et al., ICLR 2025, section 2, computed head by head.

    Layers are numbered from ``first_layer``; the lambda_init of a layer depends on its number.
    """
    return torch.stack([_paper_logits(weights, model, row, first_layer) for row in tokens])


def _paper_logits(
    weights: dict[str, Tensor], model: ModelConfig, tokens: Tensor, first_layer: int
) -> Tensor:
    w = {name: weight.double() for name, weight in weights.items()}
    embedding = w["embedding.word_embeddings.weight"]
    d, theta, eps = model.attention.head_dim, model.rope_theta, model.norm_eps
    repeat = model.attention.num_heads // model.attention.num_kv_heads
    x = embedding[tokens]
    for i in range(model.num_layers):
        layer, window = f"decoder.layers.{i}.", model.attention.of_layer(i).window
        attention = layer + "self_attention."
        normed = rms_norm(x, eps) * w[layer + "input_layernorm.weight"]
        rows = normed @ w[attention + "linear_qkv.weight"].T
        # Each group has its query heads, one key and one value, in this order.
        heads = list(rows.split(d, dim=1))
        groups = [heads[g : g + repeat + 2] for g in range(0, len(heads), repeat + 2)]
        if attention + "q_norm" in w:
            for group in groups:
                for n in range(repeat + 1):
                    norm = w[attention + ("q_norm" if n < repeat else "k_norm")]
                    group[n] = rms_norm(group[n], eps) * norm
        outputs = []
        if model.attention.kind == "diff_v1":
            lambda_init = model.attention.kinds[0].lambda_init.value
            if lambda_init is None:
                lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (i + first_layer - 1))
            first = (w[attention + "lambda_q1"] @ w[attention + "lambda_k1"]).exp()
            second = (w[attention + "lambda_q2"] @ w[attention + "lambda_k2"]).exp()
            lambda_ = first - second + lambda_init
            for j in range(model.attention.num_kv_heads):
                (*q1s, k1, v1), (*q2s, k2, v2) = groups[2 * j], groups[2 * j + 1]
                for q1, q2 in zip(q1s, q2s, strict=True):
                    a, b = (attention_map(*each, theta, window) for each in ((q1, k1), (q2, k2)))
                    a = a - lambda_ * b
                    head = a @ torch.cat((v1, v2), dim=1)
                    if attention + "head_norm" in w:
                        head = rms_norm(head, eps) * w[attention + "head_norm"] * (1 - lambda_init)
                    outputs.append(head)
        else:
            for *queries, k, v in groups:
                outputs += [attention_map(q, k, theta, window) @ v for q in queries]
        x = x + torch.cat(outputs, dim=1) @ w[attention + "linear_proj.weight"].T
        normed = rms_norm(x, eps) * w[layer + "pre_mlp_layernorm.weight"]
        gate, up = (normed @ w[layer + "mlp.linear_fc1.weight"].T).chunk(2, dim=1)
        x = x + (gate * gate.sigmoid() * up) @ w[layer + "mlp.linear_fc2.weight"].T
    x = rms_norm(x, eps) * w["decoder.final_layernorm.weight"]
    return x @ w.get("output_layer.weight", embedding).T


def make_tokens(length: int = 20) -> Tensor:
    return torch.randint(0, 257, (2, length), generator=torch.Generator().manual_seed(3))


def hf_difference(recipe: Recipe, weights: dict[str, Tensor], expected: Tensor) -> float:
    """Return the relative difference of the Hugging Face model's logits from ``expected``."""
    config = to_hf_config(recipe, END, torch.float32)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict(dict(to_hf(weights, recipe.model)))
    with torch.no_grad():
        return logit_difference(model(make_tokens()).logits.double(), expected).relative


Mutation = Callable[[ModelConfig, Rearrange], Rearrange]


def _leave_heads_as_they_lie(model: ModelConfig, split: Rearrange) -> Rearrange:
    """Return a rule that splits ``linear_qkv`` but keeps the order of its heads.

    In ``linear_qkv`` the heads of the first and the second map alternate, block by block. DiffLlama
    expects all heads of the first map before all heads of the second.
    """
    heads = model.attention.kinds[0].heads
    each = [heads.queries // heads.keys, 1, 1]

    def rearranged(fused: Tensor) -> tuple[Tensor, ...]:
        groups = fused.unflatten(0, (heads.keys, -1, heads.head_dim))
        return tuple(part.flatten(0, 2) for part in groups.split(each, dim=1))

    return rearranged


def _exchange_maps(model: ModelConfig, split: Rearrange) -> Rearrange:
    def rearranged(fused: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(fused)
        return q.roll(len(q) // 2, 0), k.roll(len(k) // 2, 0), v

    return rearranged


def _exchange_value_halves(model: ModelConfig, split: Rearrange) -> Rearrange:
    def rearranged(fused: Tensor) -> tuple[Tensor, ...]:
        q, k, v = split(fused)
        return q, k, v.roll(len(v) // 2, 0)

    return rearranged


def _leave_norm(model: ModelConfig, fold: Rearrange) -> Rearrange:
    return lambda proj, norm: (proj,)


def _spread_norm(model: ModelConfig, fold: Rearrange) -> Rearrange:
    return lambda proj, norm: (proj * norm.repeat_interleave(model.attention.num_heads),)


def _exchange_halves(model: ModelConfig, split: Rearrange) -> Rearrange:
    return lambda both: split(both)[::-1]


# Each mutation has the name of the weight whose rule is broken, and the function that breaks it.
MUTATIONS: dict[str, tuple[str, Mutation]] = {
    "heads of a pair not brought together": ("linear_qkv", _leave_heads_as_they_lie),
    "first and second map exchanged": ("linear_qkv", _exchange_maps),
    "halves of V exchanged": ("linear_qkv", _exchange_value_halves),
    "norm not folded": ("head_norm", _leave_norm),
    "norm folded into the wrong columns": ("head_norm", _spread_norm),
    "gate and up exchanged": ("linear_fc1", _exchange_halves),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("sizes", [MHA, GQA], ids=["MHA", "GQA"])
def test_a_broken_table_shows_in_the_logits(
    mutation: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(**DIFF, **sizes)
    weights = make_weights(recipe.model)
    expected = paper_logits(weights, recipe.model, make_tokens())
    assert hf_difference(recipe, weights, expected) < 1e-5
    named, mutate = MUTATIONS[mutation]
    table = layout.table

    def broken(model: ModelConfig, step: int = 0) -> list[WeightRule]:
        return [
            rule._replace(to_hf=mutate(model, rule.to_hf)) if named in " ".join(rule.ours) else rule
            for rule in table(model)
        ]

    monkeypatch.setattr(layout, "table", broken)
    assert hf_difference(recipe, weights, expected) > 1e-2


def lambdas_one_layer_on(name: str) -> str:
    *_, layer, module, part = name.split(".")
    return f"decoder.layers.{(int(layer) + 1) % 3}.{module}.{part}"


def second_lambda_first(name: str) -> str:
    return name.translate(str.maketrans("12", "21")) if name.endswith(("1", "2")) else name


@pytest.mark.parametrize("rename", [lambdas_one_layer_on, second_lambda_first])
def test_a_lambda_vector_in_the_wrong_place_shows(rename: Callable[[str], str]) -> None:
    recipe = make_recipe(**DIFF, **GQA)
    weights = make_weights(recipe.model)
    expected = paper_logits(weights, recipe.model, make_tokens())
    moved = {n: (weights[rename(n)] if "lambda" in n else weight) for n, weight in weights.items()}
    assert hf_difference(recipe, moved, expected) > 1e-2


@pytest.mark.parametrize("first_layer", [0, 2])
def test_lambda_init_of_the_neighbouring_layer_shows(first_layer: int) -> None:
    recipe = make_recipe(**DIFF, **GQA)
    weights = make_weights(recipe.model)
    expected = paper_logits(weights, recipe.model, make_tokens(), first_layer)
    assert hf_difference(recipe, weights, expected) > 1e-2


@pytest.mark.parametrize("kind", [DIFF, SOFTMAX], ids=["diff", "softmax"])
@pytest.mark.parametrize("sizes", [MHA, GQA, GQA | TIED], ids=str)
def test_table_maps_weights_in_both_directions(
    kind: dict[str, str], sizes: dict[str, object]
) -> None:
    recipe = make_recipe(**kind, **sizes)
    config = to_hf_config(recipe, END, torch.float32)
    theirs = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    back = dict(to_hf(from_hf(theirs, recipe.model), recipe.model))
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)

    ours = make_weights(recipe.model)
    for name in [name for name in ours if "head_norm" in name]:
        folded = ours[name.replace("head_norm", "linear_proj.weight")]
        folded.mul_(ours[name].repeat(recipe.model.attention.num_heads))
        ours[name].fill_(1)
    back = dict(from_hf(to_hf(ours, recipe.model), recipe.model))
    assert back.keys() == ours.keys()
    assert all(torch.equal(back[name], ours[name]) for name in ours)


def test_a_weight_that_occurs_twice_is_refused() -> None:
    model = make_recipe(**DIFF).model
    with pytest.raises(UserError, match="occurs twice"):
        list(to_hf([*make_weights(model).items()] * 2, model))
