"""Tests of captured attention logits and maps, and of the suites that use them."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from diffmegatron.errors import UserError
from diffmegatron.evaluation import captured_attention as attention
from diffmegatron.evaluation.captured_attention import (
    LayerAttention,
    layers,
    quantize_logits,
    watch_attention,
)
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suites.needle import (
    CITIES,
    Haystack,
    NeedleAttention,
    build_prompt,
    draw_needles,
    question,
)
from diffmegatron.evaluation.suites.outliers import (
    LOGITS,
    RANKS,
    Outliers,
    _Counter,
    _median_bins,
    _summed,
)
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained
from tests.unit.evaluation.stand_ins import answering

FAMILIES = {
    "plain": ("smollm2", {}),
    "qwen3": ("qwen3", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}),
    "diff": ("diffllama", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    # The functions below compute a layer's output without a gate.
    "diff_v2": ("diff_v2", {"output_gate": None}),
    "grouped": (
        "grouped",
        {
            "num_attention_heads": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
        },
    ),
}
CONTEXT = 512
HAY = " ".join(
    f"This is sentence {'abcdefghij'[n % 10]} of the text, and it says little." for n in range(40)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("attention")
    for name, (family, changes) in FAMILIES.items():
        write_pretrained(found / name, family, max_position_embeddings=CONTEXT, **changes)
    (found / "hay.txt").write_text(HAY)
    return found


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Model]:
    return {name: Model(find_targets([folder / name], folder)[0]) for name in FAMILIES}


@pytest.fixture(params=FAMILIES)
def model(request: pytest.FixtureRequest, models: dict[str, Model]) -> Model:
    return models[request.param]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", 5000)


IDS = torch.randint(256, (50,), generator=torch.Generator().manual_seed(0)).tolist()


def change_weights(source: Path, out: Path, change: Callable[[dict], object]) -> Path:
    shutil.copytree(source, out)
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def whole(
    layer: LayerAttention, of: Callable[[int, int], torch.Tensor], fill: float
) -> torch.Tensor:
    """Return all rows of a layer's logits or maps, [heads, tokens, tokens].

    The blocks of rows are joined. A block that ends with row n has only the columns 0 to n.

    Args:
        layer: layer with the blocks of rows.
        of: method of ``layer`` that returns the logits or the maps of a block of rows.
        fill: value of the columns that a block does not have.
    """
    parts = [
        torch.nn.functional.pad(of(*block), (0, layer.rows - block[1]), value=fill)
        for block in layer.blocks()
    ]
    return torch.cat(parts, dim=1)


def values_of_heads(layer: LayerAttention, heads: int) -> torch.Tensor:
    """Return the values that each head's map multiplies, [heads, tokens, width of a value].

    The computation follows the modeling code of the layer's class.
    """
    module, d = layer.module, layer.module.head_dim
    value = module.v_proj(layer.hidden)
    if hasattr(module, "groupnorm"):
        # DiffLlama's v_proj returns the first halves of all values, and then the second halves.
        halves = value.unflatten(1, (2, -1, d))
        value = torch.cat((halves[:, 0], halves[:, 1]), dim=-1)
    elif hasattr(module, "map_heads"):
        # Grouped attention has values of width 2d.
        value = value.unflatten(1, (-1, 2 * d))
    else:
        value = value.unflatten(1, (-1, d))
    value = value.transpose(0, 1)
    return value.repeat_interleave(heads // len(value), dim=0)


def output_of(layer: LayerAttention, maps: torch.Tensor) -> torch.Tensor:
    """Return the layer's output, computed from its maps."""
    module = layer.module
    heads = (maps @ values_of_heads(layer, len(maps))).transpose(0, 1)
    if hasattr(module, "groupnorm"):
        heads = (1 - module.lambda_init) * module.groupnorm(heads)
    elif getattr(module, "subln", None) is not None:
        heads = (1 - module.lambda_init) * module.subln(heads)
    return module.o_proj(heads.flatten(1))


@torch.no_grad()
def test_maps_give_the_layers_own_output(model, small_blocks):
    """Check that the output computed from a layer's captured maps equals the layer's own output."""
    outputs, seen = [], []
    hooks = [
        layer.self_attn.register_forward_hook(lambda *call: outputs.append(call[2][0][0]))
        for layer in layers(model)
    ]
    with watch_attention(model, seen.append):
        model.network.base_model(model.batch(IDS), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert [layer.number for layer in seen] == [0, 1]
    for layer, output in zip(seen, outputs, strict=True):
        assert len(list(layer.blocks())) > 5
        maps = whole(layer, layer.maps, 0.0)
        assert len(maps) == layer.head_maps.num_heads
        torch.testing.assert_close(output_of(layer, maps), output, rtol=1e-4, atol=1e-5)
        # With zeros in place of one head's map, the output must differ.
        maps[0] = 0
        assert not torch.allclose(output_of(layer, maps), output, rtol=1e-2, atol=1e-3)


@torch.no_grad()
def test_watching_attention_does_not_change_the_logits(models):
    for model in models.values():
        batch = model.batch(IDS)
        before = model.network(batch).logits
        with watch_attention(model, lambda _: None):
            during = model.network(batch, use_cache=False).logits
        assert torch.allclose(before, during, atol=1e-5)
        assert torch.equal(model.network(batch).logits, before)


@torch.no_grad()
def test_logits_are_products_of_rotated_queries_and_keys(models):
    model = models["plain"]
    seen: list[LayerAttention] = []
    with watch_attention(model, seen.append):
        model.network.base_model(model.batch(IDS), use_cache=False)
    (first, _), module = seen, seen[0].module
    query, key = (
        getattr(module, f"{each}_proj")(first.hidden).view(1, len(IDS), -1, 8).transpose(1, 2)
        for each in "qk"
    )
    turns = model.network.base_model.rotary_emb(query, torch.arange(len(IDS))[None])
    query, key = apply_rotary_pos_emb(query, key, *turns)
    for head in range(9):
        expected = (query[0, head] @ key[0, head // 3].T).numpy() / np.sqrt(8)
        found = first.logits(0, len(IDS))[head].numpy()
        earlier = np.tril(np.ones_like(found, dtype=bool))
        assert np.allclose(found[earlier], expected[earlier], atol=1e-5)
        assert np.isneginf(found[~earlier]).all()


# Quantised attention


def rounded(logits: torch.Tensor, bits: int) -> torch.Tensor:
    """Round the logits of one attention call to ``bits`` bits; all heads share one step size."""
    finite = logits[~logits.isinf()]
    step = finite.abs().max() / (2 ** (bits - 1) - 1)
    return torch.where(logits.isinf(), logits, torch.round(logits / step) * step)


@torch.no_grad()
def test_quantised_attention_is_softmax_of_rounded_logits(model, small_blocks):
    """Compare the first layer's output at 4 bits with an output computed from rounded logits.

    Quantization to 4 bits must change the output more than 50 times as much as quantization to 16
    bits.
    """
    seen, outputs = [], []
    with watch_attention(model, seen.append):
        model.network.base_model(model.batch(IDS), use_cache=False)
    layer = seen[0]
    hook = layer.module.register_forward_hook(lambda *call: outputs.append(call[2][0][0]))
    with quantize_logits(model, 4):
        model.network.base_model(model.batch(IDS), use_cache=False)
    with quantize_logits(model, 16):
        model.network.base_model(model.batch(IDS), use_cache=False)
    hook.remove()
    softmax = rounded(layer.logits(0, layer.rows), 4).softmax(-1)
    maps = layer.head_maps.subtracted(layer.module, softmax, layer.hidden)
    torch.testing.assert_close(output_of(layer, maps), outputs[0], rtol=1e-4, atol=1e-5)
    plain = output_of(layer, layer.maps(0, layer.rows))
    assert (outputs[0] - plain).abs().max() > 50 * (outputs[1] - plain).abs().max()


def test_fewer_bits_lose_more(folder, tmp_path):
    options = EvaluateSettings(data=(str(folder / "hay.txt"),))
    settings = [f"quantized-attention.{s}" for s in ("characters=150", "bits=[12,3]")]
    targets = [folder / "plain", folder / "diff"]
    evaluate(targets, ["quantized-attention"], tmp_path, options, settings)
    found = json.loads((tmp_path / "results.json").read_text())["suites"]["quantized-attention"]
    for name in ("plain", "diff"):
        records = (tmp_path / f"quantized-attention/{name}.jsonl").read_text().splitlines()
        nats = json.loads(records[1])["nats"]
        away = {bits: abs(nats[bits] - nats["as they are"]) for bits in ("12 bits", "3 bits")}
        assert away["3 bits"] > 3 * away["12 bits"] > 0
        value = found["measures"]["nats per token that 3 bits add"]["targets"][name]["value"]
        assert abs(value) == pytest.approx(away["3 bits"] / 150)


# Outliers


@torch.no_grad()
def test_outliers_are_those_of_all_values_sorted(model, folder, tmp_path, small_blocks):
    name = model.target.name
    evaluate(
        [folder / name],
        ["outliers"],
        tmp_path,
        EvaluateSettings(data=(str(folder / "hay.txt"),)),
        ["outliers.context=20", "outliers.tokens=50"],
    )
    found = json.loads((tmp_path / "results.json").read_text())["suites"]["outliers"]
    ids, logits, hidden = list(HAY[:60].encode()), [], []
    for first, count in ((0, 19), (19, 19), (38, 9)):
        seen: list[LayerAttention] = []
        with watch_attention(model, seen.append):
            states = model.network.base_model(
                model.batch([model.target.start_token, *ids[first : first + count]]),
                use_cache=False,
                output_hidden_states=True,
            ).hidden_states
        for layer in seen:
            values = layer.logits(0, layer.rows)
            logits.append(values[~values.isinf()].abs().flatten())
        # transformers applies the final norm to the last hidden state that it returns. A hook
        # captures the output of the last layer before this norm instead.
        hidden += [each.abs().flatten() for each in states[1:-1]]
        last = model.network.base_model.layers[-1]
        caught: list = []
        hook = last.register_forward_hook(lambda *call, caught=caught: caught.append(call[2]))
        model.network.base_model(
            model.batch([model.target.start_token, *ids[first : first + count]]), use_cache=False
        )
        hook.remove()
        output = caught[0][0] if isinstance(caught[0], tuple) else caught[0]
        hidden.append(output.abs().flatten())
    totals = found["totals"][name]
    for of, parts in (("attention logits", logits), ("hidden states", hidden)):
        values = np.sort(torch.cat(parts).numpy())[::-1]
        for rank in RANKS:
            assert totals[f"{of}, top-{rank}"]["value"] == pytest.approx(values[rank - 1], rel=1e-5)
        assert totals[f"{of}, median"]["value"] == pytest.approx(np.median(values), rel=1e-5)
    lines = (tmp_path / f"outliers/{name}.jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 * 3


def test_a_median_between_two_bins_is_exact():
    """Check that the median of 1, 1, 4 and 4 is 2.5, although 1 and 4 are in different bins."""
    values = torch.tensor([1.0, -4.0, 4.0, -1.0])
    first = _Counter(None, LOGITS)
    first.add(values)
    coarse = first.record()
    bins = _median_bins(_summed([coarse["bins"]], 1 << 15))
    assert len(bins) == 2
    second = _Counter(bins, LOGITS)
    second.add(values)
    records = [
        dict.fromkeys(("attention logits", "hidden states"), each)
        for each in (coarse, second.record())
    ]
    totals = Outliers(data=("x",)).totals(records)
    assert totals["attention logits, median"] == 2.5
    assert totals["attention logits, top-2"] == 4


def test_larger_query_weights_give_larger_outliers(folder, tmp_path):
    def louder(weights: dict) -> None:
        weights["model.layers.1.self_attn.q_proj.weight"] *= 10

    change_weights(folder / "diff", tmp_path / "louder", louder)
    evaluate(
        [folder / "diff", tmp_path / "louder"],
        ["outliers"],
        tmp_path / "out",
        EvaluateSettings(data=(str(folder / "hay.txt"),)),
        ["outliers.context=20", "outliers.tokens=20"],
    )
    found = json.loads((tmp_path / "out/results.json").read_text())["suites"]["outliers"]
    totals = found["totals"]
    name = "attention logits, top-1"
    assert totals["louder"][name]["value"] > 3 * totals["diff"][name]["value"]


# Needles


@pytest.fixture
def haystack(folder, models) -> Haystack:
    return Haystack(folder / "hay.txt", models["plain"].target)


def test_needles_lie_at_their_depths_in_prompts_of_one_length(haystack, models):
    tokenizer = models["plain"].target.tokenizer
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        draw = random.Random(f"{depth}")
        needles = draw_needles(4, depth, draw)
        assert len({needle.city for needle in needles}) == 4
        assert len({needle.number for needle in needles}) == 4
        asked = question([needles[0].city, needles[2].city])
        prompt = haystack.build_prompt(needles, asked, 1500, draw)
        assert len(prompt.ids) == 1500
        assert prompt.ids[0] == 1
        for needle, (first, end) in zip(needles, prompt.spans, strict=True):
            assert tokenizer.decode(prompt.ids[first:end]) == needle.sentence
            # The needle is placed at the boundary between sentences that is nearest to its depth.
            # A sentence has about 50 bytes, so the position may differ by about 25 tokens. Tokens
            # of other needles do not count.
            before = prompt.ids[1:first]
            others = sum(e - f for f, e in prompt.spans if e <= first)
            room = prompt.haystack_end - 1 - sum(e - f for f, e in prompt.spans)
            assert len(before) - others == pytest.approx(needle.depth * room, abs=40)
        assert tokenizer.decode(prompt.ids[prompt.haystack_end :]) == asked
        left = prompt.ids[1 : prompt.haystack_end]
        for first, end in sorted(prompt.spans, reverse=True):
            del left[first - 1 : end - 1]
        text = tokenizer.decode(left)
        # The haystack begins at a random sentence of the text. After the last sentence of the text,
        # it continues with the first one.
        assert text in HAY + HAY


def test_unsuitable_haystacks_lengths_and_pairs_are_errors(haystack, folder, tmp_path):
    draw = random.Random(0)
    needles = draw_needles(2, 0.5, draw)
    with pytest.raises(UserError, match=r"hay\.txt has \d+ tokens in plain, and the prompt needs"):
        haystack.build_prompt(needles, "?", 5000, draw)
    with pytest.raises(UserError, match=r"2 needles and their question have 8\d tokens"):
        haystack.build_prompt(needles, "?", 40, draw)
    options = EvaluateSettings(haystack=folder / "hay.txt")
    with pytest.raises(UserError, match=r"R may be at most N, and N at most \d+, the number"):
        evaluate([folder / "plain"], ["needle"], tmp_path, options, ["needle.pairs=[[1,2]]"])
    assert len(set(CITIES)) == len(CITIES)


def needle_results(folder: Path, out: Path) -> dict:
    evaluate(
        [folder / "plain"],
        ["needle"],
        out,
        EvaluateSettings(haystack=folder / "hay.txt"),
        [
            f"needle.{each}"
            for each in (
                "lengths=[400,500,600]",
                "pairs=[[2,1],[3,2]]",
                "depths=[0,1]",
                "samples=2",
                "answer_tokens=20",
            )
        ],
    )
    return json.loads((out / "results.json").read_text())["suites"]["needle"]


def test_answers_are_scored_by_the_share_of_found_numbers(folder, tmp_path, monkeypatch):
    """Check that an answer with the numbers of n of the R requested cities has the score n / R.

    The stand-in models write the numbers of all requested cities, of only the first one, or of no
    city.
    """

    def reads(model, request):
        assert request.stop == ("\n",)
        text = model.target.tokenizer.decode(request.ids)
        cities = re.search(r"numbers? for (.*)\? Give", text)[1].split(" and ")
        found = [re.search(rf"magic {c} number is (\d+)\.", text)[1] for c in cities]
        # Text after the end of the line does not belong to the answer.
        written = ", ".join(found[:knows]) + "\n" + ", ".join(found)
        return list(written.encode())

    monkeypatch.setattr(Model, "answers", answering(reads))
    for knows, expected in ((2, (1.0, 1.0)), (1, (1.0, 0.5)), (0, (0.0, 0.0))):
        found = needle_results(folder, tmp_path / str(knows))
        values = {n: each["targets"]["plain"]["value"] for n, each in found["measures"].items()}
        assert values == {
            f"N={n} R={r}, {length} tokens": expected[r - 1]
            for length in (400, 500)
            for n, r in ((2, 1), (3, 2))
        }
        assert found["not_run"] == [
            "plain: 8 of 24 items need a context of up to 600 tokens, and max_position_embeddings "
            "is 512"
        ]
    assert (tmp_path / "1/needle.png").exists()


@torch.no_grad()
def test_needle_attention_is_that_of_the_whole_map(models, folder, small_blocks):
    for model in models.values():
        suite = NeedleAttention(haystack=folder / "hay.txt", length=300, samples=1, needles=2)
        item = suite.items(model.target)[1]
        record = suite.score(model, item)
        assert record["depth"] == 0.25
        prompt, _ = build_prompt(folder / "hay.txt", model.target, item.key, 300, (2, 1), 0.25)
        seen: list[LayerAttention] = []
        with watch_attention(model, seen.append):
            model.network.base_model(model.batch(prompt.ids), use_cache=False)
        first, end = prompt.spans[0]
        for number, layer in enumerate(seen):
            row = whole(layer, layer.maps, 0.0)[:, -1].abs().numpy()
            answer = row[:, first:end].sum(1) / row.sum(1)
            noise = (row[:, 1:first].sum(1) + row[:, end : prompt.haystack_end].sum(1)) / row.sum(1)
            assert record["answer"][number] == pytest.approx(answer.tolist(), rel=1e-4)
            assert record["noise"][number] == pytest.approx(noise.tolist(), rel=1e-4)
        shares = suite.means(record)
        answer, noise = np.mean(record["answer"]), np.mean(record["noise"])
        assert shares["answer, depth 25%"].total == pytest.approx(answer)
        total, weight, _ = shares["answer / (answer + noise)"]
        assert total / weight == pytest.approx(answer / (answer + noise))


def test_needle_attention_distinguishes_a_model_that_attends_to_numbers(folder, tmp_path):
    """Check that a model which attends to digits has a high share of attention on the answer.

    Needles contain digits; the haystack does not. A prompt ends with the letter "s". In the first
    model, queries of "s" and keys of digits point in the same direction, along a channel that the
    rotary embedding turns slowly. In the second model, the keys have the opposite sign, so its
    share on the answer must be low.
    """
    write_pretrained(
        tmp_path / "base",
        "llama 2",
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
        rope_parameters={"rope_theta": 1e9},
    )

    def look(weights: dict) -> None:
        embedding = 0.01 * torch.randn(264, 48)
        embedding[ord("s"), 0] = 1
        for digit in b"0123456789":
            embedding[digit, 1] = 1
        weights["model.embed_tokens.weight"] = embedding
        weights["model.layers.0.input_layernorm.weight"].fill_(1)
        for each, column in (("q", 0), ("k", 1)):
            projection = torch.zeros(48, 48)
            # The rotary embedding turns the last channel of each head's first half most slowly.
            projection[3::8, column] = 3
            weights[f"model.layers.0.self_attn.{each}_proj.weight"] = projection

    torch.manual_seed(0)
    good = change_weights(tmp_path / "base", tmp_path / "good", look)
    broken = change_weights(
        good,
        tmp_path / "broken",
        lambda weights: weights["model.layers.0.self_attn.k_proj.weight"].neg_(),
    )
    evaluate(
        [good, broken],
        ["needle-attention"],
        tmp_path / "out",
        EvaluateSettings(haystack=folder / "hay.txt"),
        [f"needle-attention.{each}" for each in ("length=400", "samples=2", "depths=[0.5]")],
    )
    found = json.loads((tmp_path / "out/results.json").read_text())["suites"]["needle-attention"]
    answer, noise = (found["measures"][f"{part}, depth 50%"] for part in ("answer", "noise"))
    assert answer["targets"]["good"]["value"] > 0.9
    assert answer["targets"]["broken"]["value"] < 0.2
    assert noise["targets"]["good"]["value"] < 0.1


@torch.no_grad()
def test_maps_with_zero_lambda_equal_the_signal_maps(folder, tmp_path):
    """Check that the maps equal the signal maps if lambda is 0.

    lambda is exp(q1 k1) - exp(q2 k2) + lambda_init. The test sets the products of the lambda
    vectors to q1 k1 = 0 and q2 k2 = log(1 + lambda_init).
    """

    def zero_second(weights: dict) -> None:
        for layer, initial in enumerate((0.2, 0.8 - 0.6 * np.exp(-0.3))):
            own = f"model.layers.{layer}.self_attn.lambda_"
            for name in ("q1", "k1", "q2", "k2"):
                weights[own + name].zero_()
            weights[own + "q2"][0] = np.log(1 + initial)
            weights[own + "k2"][0] = 1

    change_weights(folder / "diff", tmp_path / "one_map", zero_second)
    (target,) = find_targets([tmp_path / "one_map"], tmp_path)
    model, seen = Model(target), []
    with watch_attention(model, seen.append):
        model.network.base_model(model.batch(IDS), use_cache=False)
    for layer in seen:
        signal = layer.logits(10, 20).softmax(-1)[:4]
        torch.testing.assert_close(layer.maps(10, 20), signal, rtol=1e-4, atol=1e-5)
        assert layer.maps(10, 20).min() > -1e-5


def test_an_unknown_kind_of_attention_is_refused(folder, tmp_path):
    shutil.copytree(folder / "plain", tmp_path / "other")
    path = tmp_path / "other/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "olmo"}))
    with pytest.raises(UserError, match=r"has model_type 'olmo', whose attention is unknown"):
        evaluate(
            [tmp_path / "other"],
            ["outliers"],
            tmp_path / "out",
            EvaluateSettings(data=(str(folder / "hay.txt"),)),
            [],
        )
