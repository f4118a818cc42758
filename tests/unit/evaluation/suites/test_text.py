"""Tests of the suites ``recall``, ``scaling`` and ``throughput``, and of reading texts."""

import json
import math
import shutil
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from diffmegatron.config.load import load_recipe
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suites.recall import count_bigrams
from diffmegatron.evaluation.suites.scaling import fit_power_law
from diffmegatron.evaluation.suites.throughput import Throughput
from diffmegatron.evaluation.targets import find_targets
from diffmegatron.evaluation.text import named_paths, read_texts
from diffmegatron.model.accounting.parameters import count_parameters
from tests.checkpoints import write_checkpoint
from tests.conftest import TINY
from tests.pretrained import write_pretrained

TEXTS = [
    "the cat and the rat and the zebra; zebras",
    "no zebra, no cat: nothing twice",
    "aXbaXbaXb",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, held-out text, and a corpus prepared with the model's tokenizer."""
    found = tmp_path_factory.mktemp("suites")
    write_pretrained(found / "plain", "llama 2")
    lines = (json.dumps({"text": text}) + "\n" for text in TEXTS)
    (found / "text.jsonl").write_text("".join(lines))
    (found / "corpus.txt").write_text("the the the cat is at the mat, the zoo has a zebra " * 5)
    prepare([found / "corpus.txt"], found / "corpus", "bytes", show_progress=False)
    return found


def results(out: Path, suite: str) -> dict:
    return json.loads((out / "results.json").read_text())["suites"][suite]


def run(targets: list[Path], suite: str, out: Path, *settings: str, **options: object) -> dict:
    evaluate(targets, [suite], out, EvaluateSettings(**options), settings)
    return results(out, suite)


# Text


def test_texts_are_the_same_from_every_form(folder, tmp_path):
    prepare([folder / "text.jsonl"], tmp_path / "prefix", "bytes", show_progress=False)
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / f"texts/{number}.txt").write_text(text)
    for path in (folder / "text.jsonl", tmp_path / "prefix", tmp_path / "texts"):
        assert list(read_texts(path)) == TEXTS
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"txt": 1}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl at line 2 is not a document: no field 'text'"):
        list(read_texts(tmp_path / "bad.jsonl"))


def test_sources_have_names_and_equal_names_are_errors():
    assert named_paths(("a/b.jsonl", "x=c.txt")) == {"b": Path("a/b.jsonl"), "x": Path("c.txt")}
    with pytest.raises(UserError, match="two sources have the name 'b'"):
        named_paths(("a/b.jsonl", "c/b.txt"))


# Recall


def hits(text: bytes, counts: Counter, most: int) -> list[int]:
    """Return the positions in ``text`` at which a repeated and rare bigram ends.

    A bigram is two consecutive bytes. It is repeated if it also occurs earlier in ``text``.

    Args:
        text: bytes of one text.
        counts: number of occurrences of each bigram in the training corpus.
        most: largest count of a rare bigram.
    """
    return [
        place
        for place in range(1, len(text))
        if text[place - 1 : place + 1] in [text[i - 1 : i + 1] for i in range(1, place)]
        and counts[text[place - 1 : place + 1]] <= most
    ]


@torch.no_grad()
def test_recall_hits_and_losses_match_a_direct_computation(folder, tmp_path):
    most = 6
    corpus = (folder / "corpus.txt").read_bytes()
    counts = Counter(corpus[i : i + 2] for i in range(len(corpus) - 1))
    network = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float64)
    hit, other, places = [], [], []
    for text in TEXTS:
        ids = torch.tensor([1, *text.encode()])
        losses = torch.nn.functional.cross_entropy(
            network(ids[None]).logits[0, :-1], ids[1:], reduction="none"
        ).numpy()
        places.append(hits(text.encode(), counts, most))
        hit += list(losses[places[-1]])
        other += list(np.delete(losses, places[-1]))
    # The first text repeats "th" and "he", which are frequent in training, and "eb", which is rare.
    # The third text repeats each of its bigrams.
    assert 0 < len(places[0]) < len(hits(TEXTS[0].encode(), counts, 10**9))
    assert len(places[2]) == 5
    found = run(
        [folder / "plain"],
        "recall",
        tmp_path / "out",
        f"recall.training={folder / 'corpus'}",
        f"recall.rare={most}",
        data=(str(folder / "text.jsonl"),),
    )["measures"]
    values = {name: each["targets"]["plain"]["value"] for name, each in found.items()}
    assert values["nats per token, AR hits"] == pytest.approx(np.mean(hit), rel=1e-5)
    assert values["nats per token, other tokens"] == pytest.approx(np.mean(other), rel=1e-5)
    assert values["share of AR hits"] == pytest.approx(len(hit) / (len(hit) + len(other)))


def test_bigrams_are_counted_across_pieces(monkeypatch):
    monkeypatch.setattr("diffmegatron.evaluation.suites.recall._BUFFER", 7)
    tokens = np.random.default_rng(0).integers(0, 5, 200).astype(np.uint16)
    expected = Counter(pairwise(tokens.tolist()))
    asked = {(a, b) for a in range(5) for b in range(7)}
    assert count_bigrams(tokens, asked) == {pair: expected[pair] for pair in asked}
    assert count_bigrams(tokens, set()) == {}


def test_recall_distinguishes_a_model_that_recalls(folder, tmp_path):
    """Check that a model which predicts a repeated text has the lower loss on AR hits.

    An AR (associative recall) hit is the second token of a bigram that occurred earlier in the text
    and is rare in the training corpus.
    """

    def write(name: str, follows: dict[str, str]) -> Path:
        shutil.copytree(folder / "plain", tmp_path / name)
        file = tmp_path / name / "model.safetensors"
        weights = load_file(file)
        for key, weight in weights.items():
            # The layers must add nothing to the residual stream.
            if "o_proj" in key or "down_proj" in key:
                weight.zero_()
        weights["model.norm.weight"].fill_(1)
        weights["model.embed_tokens.weight"] = embedding
        weights["lm_head.weight"] = torch.zeros(264, 48)
        for letter, after in follows.items():
            weights["lm_head.weight"][ord(after)] = 5 * embedding[ord(letter)]
        save_file(weights, file, {"format": "pt"})
        return tmp_path / name

    torch.manual_seed(0)
    embedding = torch.nn.functional.normalize(torch.randn(264, 48), dim=1)
    good = write("good", {"a": "X", "X": "b", "b": "a"})
    broken = write("broken", {"a": "b", "X": "X", "b": "X"})
    (tmp_path / "text.txt").write_text("aXb" * 15)
    found = run(
        [good, broken],
        "recall",
        tmp_path / "out",
        f"recall.training={folder / 'corpus'}",
        data=(str(tmp_path / "text.txt"),),
    )["measures"]["nats per token, AR hits"]
    assert found["targets"]["good"]["value"] < 1
    assert found["differences"]["broken"]["value"] > 1


def test_recall_needs_a_corpus_of_the_targets_tokenizer(folder, tmp_path):
    shutil.copytree(folder / "plain", tmp_path / "other")
    path = tmp_path / "other/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    options = {"data": (str(folder / "text.jsonl"),)}
    with pytest.raises(UserError, match=r"prepared with tokenizer 'bytes', and .* has another one"):
        run(
            [tmp_path / "other"],
            "recall",
            tmp_path / "out",
            f"recall.training={folder / 'corpus'}",
            **options,
        )
    with pytest.raises(UserError, match=r"needs --set recall\.training=: the PREFIX"):
        run([folder / "plain"], "recall", tmp_path / "out", **options)


# Scaling


def test_a_power_law_is_fitted_by_least_squares():
    xs = [8e8, 1.4e9, 2.8e9, 6.8e9]
    law = fit_power_law([(x, 31.0 * x**-0.11) for x in xs])
    assert law == pytest.approx((31.0, 0.11))
    assert law.size(law.loss(3e9)) == pytest.approx(3e9)
    # Compute the least-squares fit of the logarithms by the normal equations, for comparison.
    noisy = [31.0 * x**-0.11 * (1 + 0.01 * (-1) ** n) for n, x in enumerate(xs)]
    x, y = np.log(xs), np.log(noisy)
    slope = ((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum()
    found = fit_power_law(list(zip(xs, noisy, strict=True)))
    assert found == pytest.approx((math.exp(y.mean() - slope * x.mean()), -slope))
    assert fit_power_law([(1e9, 3.0), (1e9, 2.9)]) is None
    assert fit_power_law([(1e9, 3.0), (2e9, 3.1)]) is None


def write_run(path: Path, losses: dict[int, float]) -> Path:
    path.mkdir()
    write_checkpoint(path, max(losses))
    entries = ({"step": step, "valid/loss": loss} for step, loss in losses.items())
    (path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in entries))
    return path


def test_the_size_ratio_at_equal_loss_matches_known_curves(tmp_path):
    """Check the measured ratio of parameters at equal loss against known loss curves.

    The final losses of the runs are 9 N^-0.1 for Transformers and 9 (N / 0.6)^-0.1 for Diff
    Transformers, where N is the number of parameters without embeddings. Diff Transformers
    therefore need 60% of the parameters of Transformers.
    """
    runs = []
    for kind, share in (("diff_v1", 0.6), ("softmax", 1.0)):
        for width in (64, 128, 192):
            text = TINY.replace("hidden_size: 64", f"hidden_size: {width}").replace(
                "kind: diff_v1", f"kind: {kind}"
            )
            path = tmp_path / f"{kind}_{width}"
            file = tmp_path / "recipe.yaml"
            file.write_text(text.format(run_dir=path, corpus="corpus"))
            size = count_parameters(load_recipe(file).model).without_embeddings
            runs.append(write_run(path, {10: 5.0, 20: 9 * (size / share) ** -0.1}))
            shutil.copy(file, path / "recipe.yaml")
    found = run(runs, "scaling", tmp_path / "out")
    shares = [value for name, value in found["across"].items() if "equal loss" in name]
    assert shares == pytest.approx([0.6] * 3)
    assert found["across"]["Transformer: b of a x^-b"] == pytest.approx(0.1)
    assert found["not_run"] == []
    assert not (tmp_path / "out/exports").exists()
    assert (tmp_path / "out/scaling.png").exists()
    one = run(runs[2:3], "scaling", tmp_path / "one")
    assert one["across"] == {}
    assert one["not_run"] == [
        "Diff Transformer: no fit; the runs need at least two different numbers of parameters, and "
        "a loss that falls with them"
    ]
    tokens = run(runs[2:3], "scaling", tmp_path / "tokens", "scaling.against=tokens")
    # The run has losses at steps 10 and 20, so the fitted law goes through both. A step has 8
    # sequences of 64 tokens.
    a, b = (tokens["across"][f"Diff Transformer: {name} of a x^-b"] for name in "ab")
    assert a * (10 * 512) ** -b == pytest.approx(5.0)


def test_scaling_refuses_a_target_that_is_not_a_run(folder, tmp_path):
    with pytest.raises(UserError, match=r"suite 'scaling' reads metrics\.jsonl of runs"):
        run([folder / "plain"], "scaling", tmp_path / "out")


# Throughput


def test_throughput_counts_tokens_and_reuses_its_records(folder, tmp_path):
    settings = [f"throughput.{each}" for each in ("context=16", "decoded=4", "repetitions=2")]
    found = run([folder / "plain"], "throughput", tmp_path / "out", *settings)
    lines = (tmp_path / "out/throughput/plain.jsonl").read_text().splitlines()[1:]
    records = [json.loads(line) for line in lines]
    assert [record["tokens"] for record in records] == [16, 16, 4, 4, 16, 16]
    value = found["measures"]["prefill, tokens/s"]["targets"]["plain"]["value"]
    assert value == pytest.approx(32 / sum(record["seconds"] for record in records[:2]))
    again = run([folder / "plain"], "throughput", tmp_path / "out", *settings)
    assert again == found


def test_a_busy_machine_does_not_decide_between_equal_targets(folder, tmp_path, monkeypatch):
    """Check the difference of two equal targets if the second half of all timings is slower."""
    shutil.copytree(folder / "plain", tmp_path / "other")
    calls = []

    def score(self, model, item):
        calls.append(model.target.name)
        seconds = 0.01 if len(calls) <= 12 else 0.05
        return {"phase": item.content, "tokens": 16, "seconds": seconds, "peak_bytes": 1}

    monkeypatch.setattr(Throughput, "score", score)
    settings = [f"throughput.{each}" for each in ("context=16", "decoded=4", "repetitions=4")]
    targets = [folder / "plain", tmp_path / "other"]
    found = run(targets, "throughput", tmp_path / "out", *settings)
    assert calls == (["plain"] * 3 + ["other"] * 3) * 4
    (difference,) = found["measures"]["prefill, tokens/s"]["differences"].values()
    assert difference["low"] <= 0 <= difference["high"]


def test_throughput_refuses_to_decode_beyond_the_context(folder, tmp_path):
    settings = ("throughput.context=16", "throughput.decoded=16")
    with pytest.raises(UserError, match=r"throughput\.decoded is 16 and throughput\.context 16"):
        run([folder / "plain"], "throughput", tmp_path / "out", *settings)
    assert not (tmp_path / "out").exists()


def test_throughput_includes_the_time_of_every_forward_pass(folder, tmp_path):
    (target,) = find_targets([folder / "plain"], tmp_path)
    model, suite = Model(target), Throughput(context=16, decoded=4, repetitions=1)
    model.network.register_forward_pre_hook(lambda *_: time.sleep(0.05))
    for item in suite.items(target):
        calls = 4 if item.content == "decoding" else 1
        assert 0.05 * calls < suite.score(model, item)["seconds"] < 0.05 * calls + 2
    assert all(parameter.grad is None for parameter in model.network.parameters())
