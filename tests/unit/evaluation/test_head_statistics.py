"""Tests of the measures of heads in float64, by the definitions in docs/reference/suites.md."""

import copy
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from diffmegatron.evaluation import captured_attention as attention
from diffmegatron.evaluation.captured_attention import LayerAttention, watch_attention
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.head_statistics import (
    feature_alignment,
    head_importance,
    head_outputs,
    map_statistics,
)
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suites.attention_analysis import (
    ALIGNMENT,
    DISTANCE,
    IMPORTANCE,
)
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained

# Each model has a tuple (family, changed sizes, number of heads per layer, pairs). The pairs have
# one entry per head with two maps: the indices (signal, noise) of the query heads of the two maps.
FAMILIES = {
    "plain": ("smollm2", {}, 9, []),
    "diff": (
        "diffllama",
        {"num_attention_heads": 8, "num_key_value_heads": 4},
        4,
        [(0, 4), (1, 5), (2, 6), (3, 7)],
    ),
    "diff_v2": ("diff_v2", {}, 4, [(0, 2), (1, 2), (3, 5), (4, 5)]),
    "grouped": (
        "grouped",
        {"num_attention_heads": 12},
        8,
        [(0, 8), (1, 8), (2, 9), (3, 9), (4, 10), (5, 10), (6, 11), (7, 11)],
    ),
}
IDS = torch.randint(256, (50,), generator=torch.Generator().manual_seed(0)).tolist()
TOP, EPSILONS = 0.1, (0.01, 0.002)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("heads")
    for name, (family, changes, *_) in FAMILIES.items():
        write_pretrained(found / name, family, **changes)
    (found / "text.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} words and more of them. " * 3}) + "\n" for n in range(3))
    )
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, folder: Path) -> Model:
    return Model(find_targets([folder / request.param], folder)[0])


def look(model: Model) -> tuple[list[LayerAttention], list[torch.Tensor]]:
    seen: list[LayerAttention] = []
    heads = FAMILIES[model.target.name][2]
    with (
        torch.no_grad(),
        watch_attention(model, seen.append),
        head_outputs(model, heads) as outputs,
    ):
        model.network.base_model(model.batch(IDS), use_cache=False)
    return seen, list(outputs)


def scores(maps: torch.Tensor) -> list[list[np.ndarray]]:
    """Split maps [heads, rows, tokens] into rows; row n keeps only its scores of tokens 0 to n."""
    return [[row[: n + 1] for n, row in enumerate(head)] for head in maps.detach().double().numpy()]


def tops(row: np.ndarray) -> set[int]:
    return set(np.argsort(-row)[: int(TOP * len(row) + 1e-9)])


def entropy(row: np.ndarray) -> float:
    p = row[row > 0] / row.sum()
    return float(-(p * np.log(p)).sum())


def of_two_maps(one: list[np.ndarray], other: list[np.ndarray]) -> list[tuple[float, ...]]:
    found = []
    for a, b in zip(one, other, strict=True):
        # A row of fewer than 10 tokens has no top token, because ``TOP`` is 0.1.
        if not tops(a):
            continue
        either = sorted(tops(a) | tops(b))
        rest = sorted(set(range(len(a))) - set(either))
        inside, outside = (
            np.minimum(a, b)[part].sum() / np.maximum(a, b)[part].sum() if part else 0.0
            for part in (either, rest)
        )
        found.append((len(tops(a) & tops(b)) / len(tops(a)), inside, outside))
    return found


@torch.no_grad()
def test_statistics_of_maps_are_those_of_numpy(model, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK_BYTES", 20_000)
    seen, _ = look(model)
    found, distances = map_statistics(seen, TOP, EPSILONS)
    flat = []
    for number, layer in enumerate(seen):
        maps = layer.maps(0, layer.rows)
        heads = scores(maps)
        rows = [row for head in heads for row in head]
        expected = {
            **{
                f"share of |scores| below {e:g}": np.mean([np.mean(abs(r) < e) for r in rows])
                for e in EPSILONS
            },
            "entropy": np.mean([entropy(abs(row)) for row in rows]),
            "share of negative scores": np.mean([np.mean(row < 0) for row in rows]),
            "negative share of |scores|": np.mean(
                [-row[row < 0].sum() / abs(row).sum() for row in rows]
            ),
            "overlap of top tokens, two heads of a layer": np.mean(
                [
                    len(tops(abs(a)) & tops(abs(b))) / len(tops(abs(a)))
                    for one, other in combinations(heads, 2)
                    for a, b in zip(one, other, strict=True)
                    if tops(a)
                ]
            ),
        }
        if pairs := FAMILIES[model.target.name][3]:
            softmax = scores(layer.logits(0, layer.rows).softmax(-1))
            means = np.mean([of_two_maps(softmax[a], softmax[b]) for a, b in pairs], axis=(0, 1))
            names = ("overlap of top tokens", "overlap of top scores", "overlap of other scores")
            expected |= {f"{n}, two maps of a head": m for n, m in zip(names, means, strict=True)}
            for side, name in enumerate(("first", "second")):
                expected[f"entropy, {name} map"] = np.mean(
                    [entropy(row) for pair in pairs for row in softmax[pair[side]]]
                )
        assert {name: found[name][number] for name in found} == pytest.approx(expected, rel=1e-5)
        flat += [head.flatten() for head in maps.detach().double().numpy()]
    cosines = [[a @ b / np.sqrt((a @ a) * (b @ b)) for b in flat] for a in flat]
    assert np.allclose(distances, 1 - np.array(cosines), atol=1e-6)
    # The statistics must have been computed from several blocks of rows.
    assert len(list(seen[0].blocks())) > 3


@torch.no_grad()
def test_pairs_of_maps_are_those_that_are_subtracted(model):
    """Check that each row of a head is its signal map minus a factor times its noise map."""
    layer = look(model)[0][1]
    softmax, maps = layer.logits(0, 50).softmax(-1), layer.maps(0, 50)
    pairs = layer.head_maps.pairs
    assert list(pairs) == FAMILIES[model.target.name][3]
    for head, (signal, noise) in enumerate(pairs):
        ratios = ((softmax[signal] - maps[head]) / softmax[noise])[9:, :9]
        assert (ratios.std(1) < 1e-4 * ratios.mean(1).abs()).all()


def hsic(one: np.ndarray, other: np.ndarray) -> float:
    """Return HSIC (Nguyen et al., equation 3) of two matrices of features [tokens, width]."""
    n = len(one)
    k, l = (x @ x.T * (1 - np.eye(n)) for x in (one, other))  # noqa: E741
    ones = np.ones(n)
    total = (ones @ k @ ones) * (ones @ l @ ones) / ((n - 1) * (n - 2))
    return (np.trace(k @ l) + total - 2 / (n - 2) * (ones @ k @ l @ ones)) / (n * (n - 3))


def test_alignment_is_that_of_matrices_of_tokens(model):
    _, outputs = look(model)
    features = [x.double().numpy() for layer in outputs for x in layer.unbind(1)]
    expected = [[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in features] for a in features]
    found = feature_alignment(outputs).numpy()
    assert np.allclose(found, expected, atol=1e-5)
    # The alignment of features with the same features rotated, scaled and shifted is 1.
    turn = torch.linalg.qr(torch.randn(outputs[0].shape[2], outputs[0].shape[2]))[0]
    alike = feature_alignment([outputs[0], 3 * outputs[0] @ turn + 1]).numpy()
    heads = outputs[0].shape[1]
    assert np.allclose(np.diag(alike[:heads, heads:]), 1, atol=1e-5)


def test_importance_is_the_slope_of_the_loss(model):
    """Compare the importance of a head with the slope by finite differences in float64.

    The test scales the head's columns of ``o_proj`` by 1 + step and by 1 - step.
    """
    heads = FAMILIES[model.target.name][2]
    found = head_importance(model, IDS, heads)
    network = copy.deepcopy(model.network).double()
    ids = torch.tensor(IDS)[None]

    @torch.no_grad()
    def loss(layer: int, head: int, factor: float) -> float:
        weight = network.base_model.layers[layer].self_attn.o_proj.weight
        width = weight.shape[1] // heads
        kept = weight.clone()
        weight[:, head * width : (head + 1) * width] *= factor
        logits = network(ids).logits[0, :-1]
        weight.copy_(kept)
        return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()

    def slope(layer: int, head: int, step: float) -> float:
        return (loss(layer, head, 1 + step) - loss(layer, head, 1 - step)) / (2 * step)

    # The norms of transformers round to float32 even in a float64 network, so the step is large.
    # Half the step has a fourth of the error, which the difference of both removes.
    step = 0.02
    slopes = [
        [
            abs(4 * slope(layer, head, step / 2) - slope(layer, head, step)) / 3
            for head in range(heads)
        ]
        for layer in range(2)
    ]
    assert np.allclose(found, slopes, rtol=1e-3, atol=3e-5)


def test_the_suite_gives_means_of_texts_and_layers(folder, tmp_path):
    names = ["plain", "diff"]
    evaluate(
        [folder / name for name in names],
        ["attention-analysis"],
        tmp_path,
        EvaluateSettings(data=(str(folder / "text.jsonl"),)),
        ["attention-analysis.length=40", "attention-analysis.documents=2"],
    )
    found = json.loads((tmp_path / "results.json").read_text())["suites"]["attention-analysis"]
    assert (tmp_path / "attention-analysis.png").stat().st_size > 50_000
    for name in names:
        lines = (tmp_path / f"attention-analysis/{name}.jsonl").read_text().splitlines()[1:]
        records, heads = [json.loads(line) for line in lines], FAMILIES[name][2]
        assert len(records) == 2
        means = {m: v["targets"][name] for m, v in found["measures"].items()}
        assert means["entropy"]["value"] == pytest.approx(
            np.mean([record["layers"]["entropy"] for record in records])
        )
        # Weight each entry [layer, layer] by its number of pairs of heads. Two different layers
        # have more pairs than a layer with itself, because a head does not form a pair with itself.
        within, across = 2 * heads * (heads - 1), 2 * heads**2
        for measure in (DISTANCE, ALIGNMENT):
            tables = np.mean([record[measure]["layers"] for record in records], axis=0)
            weights = np.array([[within, across], [across, within]])
            assert means[measure]["value"] == pytest.approx(
                (tables * weights).sum() / weights.sum()
            )
        assert np.shape(records[0][IMPORTANCE]) == (2, heads)
        paired = means["overlap of top tokens, two maps of a head"]
        assert (paired is None) == (name == "plain")
        assert means["share of negative scores"]["value"] == 0 or name != "plain"
