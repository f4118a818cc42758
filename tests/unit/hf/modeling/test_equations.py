"""Tests of the models of hf/modeling against their equations, head by head in float64."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from diffmegatron.hf.modeling import (
    DiffV2Config,
    DiffV2ForCausalLM,
    GatedLlamaConfig,
    GatedLlamaForCausalLM,
    GroupedDiffConfig,
    GroupedDiffForCausalLM,
)

SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
}


# Keys that give the first and the last of the three layers a window.
WINDOWS = (
    ("layer_types", ["sliding_attention", "full_attention", "sliding_attention"]),
    ("sliding_window", 4),
)


class Case(NamedTuple):
    """Configuration of a model to test.

    Attributes:
        kind: model type.
        ratio: number of signal heads per noise head; 0 without noise heads.
        queries: number of query heads of q_proj, of signal and noise together.
        keys: number of key heads of k_proj.
        more: other keys of the configuration, with their values.
    """

    kind: str
    ratio: int
    queries: int
    keys: int
    more: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        named = "".join(f", {name} {value}" for name, value in self.more if name != "layer_types")
        return f"{self.kind} r {self.ratio}, {self.queries} q, {self.keys} kv{named}"


V2 = [
    Case("diff_v2", 1, 8, 4),
    Case("diff_v2", 1, 8, 2, (("qk_norm", True),)),
    Case("diff_v2", 2, 12, 2, (("tie_word_embeddings", True), *WINDOWS)),
    Case("diff_v2", 4, 10, 2, (("output_gate", "elementwise"),)),
    Case("diff_v2", 1, 8, 4, (("output_gate", "headwise"),)),
]
GROUPED = [
    Case("grouped_diff", 1, 8, 4, (("tie_word_embeddings", True),)),
    Case("grouped_diff", 1, 8, 8, (("headwise_norm", False), ("lambda_init", 0.4))),
    Case("grouped_diff", 2, 12, 4, (("qk_norm", True), *WINDOWS)),
    Case("grouped_diff", 4, 10, 4, (("lambda_init", 0.7), ("output_gate", "headwise"))),
    Case("grouped_diff", 1, 8, 4, (("output_gate", "elementwise"),)),
]
GATED = [
    Case("gated_llama", 0, 6, 2, (("qk_norm", True),)),
    Case("gated_llama", 0, 4, 4, (("output_gate", "headwise"), *WINDOWS)),
]
CASES = V2 + GROUPED + GATED
TYPICAL = [V2[2], GROUPED[2]]


def make_model(case: Case, seed: int = 0) -> PreTrainedModel:
    """Return a model whose attention, norms and lambda are far from their initial values."""
    numbers = {**SIZES, "signal_per_noise": case.ratio, **dict(case.more)}
    heads = {"num_attention_heads": case.queries, "num_key_value_heads": case.keys}
    if case.kind == "diff_v2":
        model: PreTrainedModel = DiffV2ForCausalLM(DiffV2Config(**numbers | heads))
    elif case.kind == "gated_llama":
        numbers.pop("signal_per_noise")
        model = GatedLlamaForCausalLM(GatedLlamaConfig(**numbers | heads))
    else:
        signals = case.queries // (case.ratio + 1) * case.ratio
        numbers |= {"num_signal_heads": signals, "num_attention_heads": 4 * signals}
        numbers["num_key_value_heads"] = 2 * case.keys
        model = GroupedDiffForCausalLM(GroupedDiffConfig(**numbers))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            random = torch.randn(weight.shape, generator=generator)
            if "lambda_" in name and weight.dim() == 1:
                weight.copy_(0.4 * random)
            elif weight.dim() == 1:
                weight.copy_(1 + 0.3 * random)
            else:
                weight.copy_(random * 1.5 / math.sqrt(weight.shape[1]))
    return model.eval()


def make_tokens(batch: int = 2, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SIZES["vocab_size"], (batch, length), generator=generator)


def rms_norm(x: Tensor, weight: Tensor | None) -> Tensor:
    unit = x / torch.sqrt((x * x).mean() + SIZES["rms_norm_eps"])
    return unit if weight is None else unit * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """Return the d channels of a head after RoPE at a position; i and i + d / 2 are a pair."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        angle = position * 700.0 ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def window_in(case: Case, layer: int) -> int:
    """Return the number of tokens that a token sees in a layer; a large number without a window."""
    more = dict(case.more)
    types = more.get("layer_types", ["full_attention"] * SIZES["num_hidden_layers"])
    return more["sliding_window"] if types[layer] == "sliding_attention" else 1000


def attention(
    queries: list[Tensor], keys: list[Tensor], values: list[Tensor], window: int
) -> list[Tensor]:
    """Return the causal attention of one head; all lists have one tensor per position."""
    keys = [rotated(key, t) for t, key in enumerate(keys)]
    out = []
    for s, query in enumerate(queries):
        seen = range(max(0, s + 1 - window), s + 1)
        scores = [rotated(query, s) @ keys[t] / math.sqrt(len(query)) for t in seen]
        weights = torch.softmax(torch.stack(scores), dim=0)
        out.append(sum(weight * values[t] for weight, t in zip(weights, seen, strict=True)))
    return out


def rows(matrix: Tensor, head: int, width: int, inputs: list[Tensor]) -> list[Tensor]:
    return [matrix[head * width : (head + 1) * width] @ x for x in inputs]


def normed_rows(
    w: dict[str, Tensor], part: str, case: Case, head: int, inputs: list[Tensor]
) -> list[Tensor]:
    """Return the rows of a query head ("q") or a key head ("k"), normalized with ``qk_norm``."""
    each = rows(w[f"{part}_proj.weight"], head, SIZES["head_dim"], inputs)
    if not dict(case.more).get("qk_norm"):
        return each
    return [rms_norm(x, w[f"{part}_norm.weight"]) for x in each]


def gated(w: dict[str, Tensor], heads: list[Tensor], x: Tensor) -> list[Tensor]:
    """Return the heads of one position times the sigmoid of the gate; ``x`` is the input."""
    if "output_gate.weight" not in w:
        return heads
    factors = 1 / (1 + torch.exp(-(w["output_gate.weight"] @ x)))
    of_heads = factors.split(len(factors) // len(heads))
    return [head * factor for head, factor in zip(heads, of_heads, strict=True)]


def diff_v2(w: dict[str, Tensor], case: Case, layer: int, inputs: list[Tensor]) -> list[Tensor]:
    d, r = SIZES["head_dim"], case.ratio
    heads = []
    for n in range(case.queries):
        j = n // (case.queries // case.keys)
        heads.append(
            attention(
                normed_rows(w, "q", case, n, inputs),
                normed_rows(w, "k", case, j, inputs),
                rows(w["v_proj.weight"], j, d, inputs),
                window_in(case, layer),
            )
        )
    out = []
    for s, x in enumerate(inputs):
        merged = []
        for n in range(case.queries * r // (r + 1)):
            group, within = n // r, n % r
            weight = 1 / (1 + torch.exp(-(w["lambda_proj.weight"][n] @ x)))
            signal = heads[group * (r + 1) + within][s]
            noise = heads[group * (r + 1) + r][s]
            merged.append(signal - weight * noise)
        out.append(w["o_proj.weight"] @ torch.cat(gated(w, merged, x)))
    return out


def gated_llama(w: dict[str, Tensor], case: Case, layer: int, inputs: list[Tensor]) -> list[Tensor]:
    heads = []
    for n in range(case.queries):
        j = n // (case.queries // case.keys)
        queries, keys = normed_rows(w, "q", case, n, inputs), normed_rows(w, "k", case, j, inputs)
        values = rows(w["v_proj.weight"], j, 6, inputs)
        heads.append(attention(queries, keys, values, window_in(case, layer)))
    merged = zip(zip(*heads, strict=True), inputs, strict=True)
    return [w["o_proj.weight"] @ torch.cat(gated(w, [*each], x)) for each, x in merged]


def grouped(w: dict[str, Tensor], case: Case, layer: int, inputs: list[Tensor]) -> list[Tensor]:
    d, r, more = SIZES["head_dim"], case.ratio, dict(case.more)
    signals, noises, pairs = case.queries * r // (r + 1), case.queries // (r + 1), case.keys // 2
    start = more.get("lambda_init", 0.8 - 0.6 * math.exp(-0.3 * layer))
    lambda_ = (
        torch.exp(w["lambda_q1"] @ w["lambda_k1"])
        - torch.exp(w["lambda_q2"] @ w["lambda_k2"])
        + start
    )
    merged: list[list[Tensor]] = [[] for _ in inputs]
    for n in range(signals):
        m = n // r
        j = m // (noises // pairs)
        value = rows(w["v_proj.weight"], j, 2 * d, inputs)
        window = window_in(case, layer)
        first = attention(
            normed_rows(w, "q", case, n, inputs),
            normed_rows(w, "k", case, j, inputs),
            value,
            window,
        )
        second = attention(
            normed_rows(w, "q", case, signals + m, inputs),
            normed_rows(w, "k", case, pairs + j, inputs),
            value,
            window,
        )
        for s in range(len(inputs)):
            head = first[s] - lambda_ * second[s]
            if more.get("headwise_norm", True):
                head = (1 - start) * rms_norm(head, w["subln.weight"])
            merged[s].append(head)
    pairs = zip(merged, inputs, strict=True)
    return [w["o_proj.weight"] @ torch.cat(gated(w, heads, x)) for heads, x in pairs]


def expected_logits(model: PreTrainedModel, case: Case, tokens: Tensor) -> Tensor:
    """Return the logits [b, s, vocab] by the equations, in float64."""
    weights = {name: weight.detach().double() for name, weight in model.state_dict().items()}
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if dict(case.more).get("tie_word_embeddings") else weights["lm_head.weight"]
    attend = {"diff_v2": diff_v2, "grouped_diff": grouped, "gated_llama": gated_llama}[case.kind]
    batches = []
    for row in tokens:
        stream = [embedding[token] for token in row]
        for layer in range(SIZES["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            w = {n.removeprefix(prefix): x for n, x in weights.items() if n.startswith(prefix)}
            own = {n.removeprefix("self_attn."): x for n, x in w.items()}
            inputs = [rms_norm(x, w["input_layernorm.weight"]) for x in stream]
            stream = [x + y for x, y in zip(stream, attend(own, case, layer, inputs), strict=True)]
            for s, x in enumerate(stream):
                y = rms_norm(x, w["post_attention_layernorm.weight"])
                gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
                stream[s] = x + w["mlp.down_proj.weight"] @ (gate / (1 + torch.exp(-gate)) * up)
        out = [head @ rms_norm(x, weights["model.norm.weight"]) for x in stream]
        batches.append(torch.stack(out))
    return torch.stack(batches)


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


class Rope64(nn.Module):
    """RoPE's cosines and sines in float64; transformers rounds them to float32 in every model."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        half = SIZES["head_dim"] // 2
        frequencies = 700.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Convert a model to float64, including RoPE and norms, which Llama rounds to float32."""
    model.double()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LlamaRMSNorm | Qwen2RMSNorm):
                norm = nn.RMSNorm(len(child.weight), child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(module, name, norm)
    model.model.rotary_emb = Rope64()
    return model


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_logits_are_those_of_the_equations(case: Case) -> None:
    model, tokens = make_model(case), make_tokens()
    expected = expected_logits(model, case, tokens)
    assert relative(model(tokens).logits.double(), expected) < 1e-5
    assert relative(in_float64(model)(tokens).logits, expected) < 1e-12


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_permuting_any_attention_weight_changes_the_logits(case: Case) -> None:
    """Check that the logits change if rows or columns of any attention tensor are permuted."""
    model, tokens = make_model(case), make_tokens(1, 5)
    expected = expected_logits(model, case, tokens)
    for name, weight in model.model.layers[1].self_attn.named_parameters():
        kept = weight.clone()
        weight.copy_(
            kept.roll(1, dims=-1) if name.startswith(("o_proj", "lambda")) else kept.flip(0)
        )
        assert relative(model(tokens).logits, expected) > 1e-4, name
        weight.copy_(kept)


@torch.no_grad()
def test_pairs_of_diff_v2_are_adjacent() -> None:
    """Check that the logits change if all signal heads are moved before all noise heads."""
    case, tokens = V2[1], make_tokens(1, 5)
    model = make_model(case)
    expected = model(tokens).logits
    for layer in model.model.layers:
        weight = layer.self_attn.q_proj.weight
        pairs = weight.view(case.queries // 2, 2, SIZES["head_dim"], -1)
        weight.copy_(pairs.transpose(0, 1).reshape(weight.shape))
    assert relative(model(tokens).logits, expected) > 1e-2


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    model, tokens = make_model(case).train(), make_tokens()
    model(tokens, labels=tokens).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.abs().max() > 0, name


@pytest.mark.parametrize("case", TYPICAL, ids=str)
def test_gradient_checkpointing_changes_no_gradient(case: Case) -> None:
    tokens, gradients = make_tokens(), []
    for checkpointing in (False, True):
        model = make_model(case).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("case", TYPICAL, ids=str)
@torch.no_grad()
def test_bf16_is_as_close_as_its_rounding(case: Case) -> None:
    model, tokens = make_model(case), make_tokens()
    expected = model(tokens).logits
    assert relative(model.bfloat16()(tokens).logits.float(), expected) < 0.1


def test_new_lambda_vectors_and_norms_have_their_initial_values() -> None:
    config = GroupedDiffConfig(
        **{**SIZES, "head_dim": 512, "num_hidden_layers": 1},
        num_attention_heads=3,
        signal_per_noise=2,
        num_key_value_heads=2,
    )
    attention = GroupedDiffForCausalLM(config).model.layers[0].self_attn
    for vector in (
        attention.lambda_q1,
        attention.lambda_k1,
        attention.lambda_q2,
        attention.lambda_k2,
    ):
        assert 0.08 < vector.std() < 0.12
    assert torch.equal(attention.subln.weight, torch.ones(1024))
    assert 0.018 < attention.o_proj.weight.std() < 0.022
