"""Tests of generation, padding and attention functions of the models of hf/modeling."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations import flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.unit.hf.modeling.test_equations import (
    CASES,
    SIZES,
    TYPICAL,
    make_model,
    make_tokens,
    relative,
    window_in,
)

PAD = 0


def generate(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
    mask = options.pop("attention_mask", torch.ones_like(tokens))
    return model.generate(tokens, attention_mask=mask, **greedy, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_steps_with_a_cache_give_the_logits_of_the_whole(case: Any) -> None:
    model, tokens = make_model(case), make_tokens()
    expected = model(tokens).logits
    cache, found = None, []
    for part in tokens.split((4, 1, 1, 3), dim=1):
        step = model(part, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        found.append(step.logits)
    assert relative(torch.cat(found, dim=1), expected) < 1e-5
    assert len(cache.layers) == SIZES["num_hidden_layers"]
    for number, layer in enumerate(cache.layers):
        # The next token sees itself and window - 1 cached tokens.
        length = min(9, window_in(case, number) - 1)
        shape = (2, case.keys, length, SIZES["head_dim"])
        assert layer.keys.shape == layer.values.shape == shape


@pytest.mark.parametrize("case", TYPICAL, ids=str)
@torch.no_grad()
def test_every_cache_generates_the_same_tokens_as_no_cache(case: Any) -> None:
    model, tokens = make_model(case), make_tokens()
    expected = generate(model, tokens, use_cache=False)
    assert torch.equal(generate(model, tokens), expected)
    assert torch.equal(generate(model, tokens, cache_implementation="static"), expected)
    beams = [generate(model, tokens, num_beams=3, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*beams)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("case", TYPICAL, ids=str)
@torch.no_grad()
def test_padding_changes_no_logit(case: Any, implementation: str, side: str) -> None:
    model = make_model(case)
    model.set_attn_implementation(implementation)
    short, long = make_tokens(1, 5), make_tokens(1, 9)
    pads, ones = torch.full((1, 4), PAD), torch.ones(1, 5, dtype=torch.long)
    order = (lambda *x: x[::-1]) if side == "right" else (lambda *x: x)
    padded = torch.cat(order(pads, short), dim=1)
    mask = torch.cat(order(torch.zeros_like(pads), ones), dim=1)
    real = slice(4, 9) if side == "left" else slice(0, 5)
    logits = model(
        torch.cat((padded, long)), attention_mask=torch.cat((mask, torch.ones_like(mask)))
    ).logits
    assert relative(logits[:1, real], model(short).logits) < 1e-5
    assert relative(logits[1:], model(long).logits) < 1e-5


@pytest.mark.parametrize("case", TYPICAL, ids=str)
@torch.no_grad()
def test_a_padded_batch_generates_the_same_tokens_as_its_rows(case: Any) -> None:
    model = make_model(case)
    short, long = make_tokens(1, 5), make_tokens(1, 9)
    batch = torch.cat((torch.nn.functional.pad(short, (4, 0), value=PAD), long))
    mask = torch.ones_like(batch)
    mask[0, :4] = 0
    found = generate(model, batch, attention_mask=mask)
    assert torch.equal(found[:1, 4:], generate(model, short))
    assert torch.equal(found[1:], generate(model, long))


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_eager_equals_sdpa_and_shows_the_maps(case: Any) -> None:
    model, tokens = make_model(case), make_tokens()
    expected = model(tokens).logits
    model.set_attn_implementation("eager")
    outputs = model(tokens, output_attentions=True)
    assert relative(outputs.logits, expected) < 1e-5
    assert len(outputs.attentions) == SIZES["num_hidden_layers"]
    for maps in outputs.attentions:
        assert maps.shape == (2, case.queries, 9, 9)
        assert torch.allclose(maps.sum(-1), torch.ones(2, case.queries, 9))


def causal_softmax(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Return causal softmax attention; the queries are at the last positions of the keys.

    With a ``window``, a query sees that many keys, its own included. All tensors are [b, s, heads,
    d]; the number of key heads divides the number of query heads.
    """
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("bshd,bthd->bhst", query, key) * scale
    s, t = scores.shape[-2:]
    visible = torch.ones(s, t).tril(t - s)
    if window is not None:
        visible = visible.triu(t - s + 1 - window)
    scores.masked_fill_(visible == 0, -torch.inf)
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), value)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_flash_attention_is_called_with_heads_of_one_width(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers looks for a dtype to which it converts float32 inputs of flash attention. It does
    # not convert float64 inputs.
    model, tokens = make_model(case).double(), make_tokens()
    expected = model(tokens).logits
    calls = []

    def stand_in(query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any) -> Tensor:
        assert mask is None and options["is_causal"] and options["dropout"] == 0.0
        assert query.shape[-1] == key.shape[-1] == value.shape[-1] == SIZES["head_dim"]
        assert key.shape == value.shape
        assert query.shape[2] % key.shape[2] == 0
        calls.append(options["layer_idx"])
        window = options["sliding_window"]
        return causal_softmax(query, key, value, options["softmax_scale"], window)

    # Replace only the kernel, which a CPU lacks. The function of transformers around it still runs.
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", stand_in)
    monkeypatch.setattr(model.config, "_attn_implementation", "flash_attention_2")
    assert relative(model(tokens).logits, expected) < 1e-12
    assert calls == [0, 1, 2]


class EngineAttention:
    """Stand-in for the attention of a serving engine in one layer, with its key-value cache.

    As in the generic transformers backends of vLLM and SGLang, the number and width of the cached
    heads come from the model's configuration alone. Queries, keys and values have all heads of a
    token in one dimension: [tokens, heads x d].
    """

    def __init__(self, config: Any) -> None:
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.cache = [torch.zeros(0, self.kv_heads, self.head_dim) for _ in range(2)]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        new = [x.view(len(query), self.kv_heads, self.head_dim) for x in (key, value)]
        self.cache = [torch.cat(x) for x in zip(self.cache, new, strict=True)]
        query = query.view(len(query), self.heads, self.head_dim)
        cached = (x[None] for x in self.cache)
        return causal_softmax(query[None], *cached, scale, window)[0].flatten(1)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_an_engine_hosts_a_model_with_one_cache_slot_per_layer(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        *,
        scaling: float,
        sliding_window: int | None,
        engine: list[EngineAttention],
        **_: Any,
    ) -> tuple[Tensor, None]:
        assert mask is None
        flat = (x.transpose(1, 2).reshape(query.shape[2], -1) for x in (query, key, value))
        return engine[module.layer_idx](*flat, scaling, sliding_window), None

    model, tokens = make_model(case), make_tokens(1)
    expected = model.model(tokens).last_hidden_state
    assert type(model).is_backend_compatible()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "engine", attend)
    monkeypatch.setattr(model.config, "_attn_implementation", "engine")
    engine = [EngineAttention(model.config) for _ in model.model.layers]
    found = [
        model.model(
            tokens[:, positions],
            position_ids=positions[None],
            use_cache=False,
            engine=engine,
        ).last_hidden_state
        for positions in torch.arange(9).split((5, 1, 3))
    ]
    assert relative(torch.cat(found, dim=1), expected) < 1e-5
