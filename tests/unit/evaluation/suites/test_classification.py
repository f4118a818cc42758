"""Tests of the suites ``many-shot`` and ``order``, of their data sets and of the label tree."""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suites.classification import (
    TASKS,
    Example,
    Order,
    Prompt,
    arranged,
    label_tree,
)
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained
from tests.unit.evaluation.stand_ins import answering

TREC = (
    "DESC:manner How do caf\xe9s work ?\nENTY:animal Which bird sings ?\nHUM:ind Who wrote it ?\n"
    "LOC:city What town lies there ?\nNUM:date When was it ?\nABBR:exp What does it stand for ?\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two models, and data sets of a few items in the published formats."""
    found = tmp_path_factory.mktemp("classes")
    write_pretrained(found / "plain", "llama 2", max_position_embeddings=450)
    write_pretrained(found / "diff", "diffllama", max_position_embeddings=450)
    (found / "trec_train.txt").write_text(TREC * 2, encoding="latin-1")
    (found / "trec_test.txt").write_text(TREC, encoding="latin-1")
    rows = 'text,category\n"Where, then, is my card?",card_arrival\nWhat rate?,exchange_rate\n'
    for split in ("train", "test"):
        (found / f"banking77_{split}.csv").write_text(rows)
    clinic = {split: [["say hello", "greeting"], ["bye", "goodbye"]] for split in ("train", "test")}
    (found / "clinc150.json").write_text(json.dumps(clinic | {"oos_train": [["x", "oos"]]}))
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return Model(find_targets([folder / "plain"], folder)[0])


def test_published_forms_are_read(folder):
    assert TASKS["trec"].test.examples(folder)[0] == ("How do caf\xe9s work ?", "description")
    assert TASKS["trec-fine"].test.examples(folder)[3][1] == "location city"
    assert TASKS["banking77"].train.examples(folder) == [
        ("Where, then, is my card?", "card arrival"),
        ("What rate?", "exchange rate"),
    ]
    assert TASKS["clinic150"].test.examples(folder) == [
        ("say hello", "greeting"),
        ("bye", "goodbye"),
    ]
    shown = TASKS["banking77"].demonstration(Example("What rate?", "exchange rate"))
    assert shown == "query: What rate?\nintent: exchange rate\n\n"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"trec_train\.txt does not exist; it must be the TREC"),
        ("no type\n", "at line 1 is .no type.; it must be .COARSE:fine question"),
    ],
)
def test_missing_and_foreign_files_and_unknown_tasks_are_errors(content, said, folder, tmp_path):
    if content is not None:
        (tmp_path / "trec_train.txt").write_text(content)
    for suite in ("many-shot", "order"):
        with pytest.raises(UserError, match=said):
            evaluate(
                [folder / "plain"],
                [suite],
                tmp_path / "out",
                EvaluateSettings(data_dir=tmp_path),
                [],
            )
    with pytest.raises(UserError, match="task 'trek' is unknown"):
        options = EvaluateSettings(data_dir=folder)
        evaluate([folder / "plain"], ["order"], tmp_path / "out", options, ["order.tasks=[trek]"])


# Label tree


LABELS = ["cat", "category", "dog", "do", "cats and dogs", "zebra"]


def ends(node, path: bytes = b"") -> dict[str, bytes]:
    if not node:
        return {node.label: path}
    return {
        k: v for token, each in node.items() for k, v in ends(each, path + bytes([token])).items()
    }


def test_labels_that_are_prefixes_of_others_end_with_the_separator(model):
    tree = label_tree(LABELS, model.target)
    assert ends(tree) == {
        "cat": b" cat\n\n",
        "category": b" category",
        "dog": b" dog",
        "do": b" do\n\n",
        "cats and dogs": b" cats and dogs",
        "zebra": b" zebra",
    }
    assert tree.depth == len(" cats and dogs")


@pytest.mark.parametrize("label", LABELS)
def test_every_label_is_read_from_its_tokens(label, model):
    prompt = Prompt("", [1], label_tree(LABELS, model.target))
    (path,) = (path for name, path in ends(prompt.labels).items() if name == label)
    assert prompt.label(list(path)) == label


@torch.no_grad()
def test_choices_are_those_of_whole_forward_passes(model):
    """Compare the chosen label with a greedy search over the label strings without a KV cache."""
    draw = random.Random(0)
    labels = ["".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(12)]
    labels = sorted(set(labels))
    tree = label_tree(labels, model.target)
    for number in range(5):
        prefix, question = [1, *range(10 + number, 30)], [40, 41 + number, 42]
        texts = {}
        for label in labels:
            begins = any(o != label and o.startswith(label) for o in labels)
            texts[label] = f" {label}{chr(10) * 2 if begins else ''}".encode()
        done = b""
        while len(texts) > 1:
            logits = model.network(model.batch([*prefix, *question, *done])).logits[0, -1]
            allowed = {text[len(done)] for text in texts.values()}
            done += bytes([max(allowed, key=lambda token: logits[token].item())])
            texts = {k: text for k, text in texts.items() if text.startswith(done)}
        (expected,) = texts
        prompt = Prompt("", prefix, tree)
        ((_, tokens),) = model.answers([prompt.request(question)])
        assert prompt.label(tokens) == expected


# The suites


def test_examples_are_arranged_by_class_in_turn():
    examples = [Example(str(n), label) for n, label in enumerate("aaabbc")]
    for permutation in range(5):
        found = arranged(examples, "alternating", permutation)
        assert sorted(found) == sorted(examples)
        labels = [example.label for example in found]
        assert set(labels[:3]) == set("abc")
        assert set(labels[3:5]) == set("ab")
        assert labels[5] == "a"
        shuffled = arranged(examples, "random", permutation)
        assert sorted(shuffled) == sorted(examples)
    orders = {tuple(arranged(examples, "random", n)) for n in range(10)}
    assert len(orders) > 5
    assert arranged(examples, "random", 3) == arranged(examples, "random", 3)


def results(folder: Path, out: Path, suite: str, *settings: str, targets=("plain", "diff")) -> dict:
    evaluate(
        [folder / name for name in targets],
        [suite],
        out,
        EvaluateSettings(data_dir=folder),
        settings,
    )
    return json.loads((out / "results.json").read_text())["suites"][suite]


def test_many_shot_counts_right_answers(folder, tmp_path, monkeypatch):
    """Check that the accuracy is 5/6 if only the answer to the question about a town is wrong.

    Prompts with 12 examples exceed the model's context, so only prompts with 1 and 5 examples are
    scored.
    """

    def knows(model, request):
        text = model.target.tokenizer.decode(request.ids[request.shared :])
        label = (
            "entity"
            if "town" in text
            else next(e.label for e in TASKS["trec"].test.examples(folder) if e.text in text)
        )
        return list(ends(request.labels)[label])

    monkeypatch.setattr(Model, "answers", answering(knows))
    settings = ("many-shot.tasks=[trec]", "many-shot.shots=[1,5,12]")
    found = results(folder, tmp_path, "many-shot", *settings)
    for name in ("trec, mean over shots", "trec, 1 shots", "trec, 5 shots"):
        value = found["measures"][name]["targets"]["plain"]
        assert value["value"] == pytest.approx(5 / 6)
        # The stand-in's answers do not depend on the number of examples, so the mean over 1 and 5
        # examples has the same value and the same interval.
        assert value == found["measures"]["trec, 1 shots"]["targets"]["plain"]
        assert value["items"] == 6
    assert [line.split(" need")[0] for line in found["not_run"]] == [
        "plain: 6 of 18 items",
        "diff: 6 of 18 items",
    ]
    records = [json.loads(x) for x in (tmp_path / "many-shot/plain.jsonl").read_text().splitlines()]
    assert Counter(r["shots"] for r in records[1:]) == {1: 6, 5: 6}
    assert {r["given"] for r in records[1:] if not r["right"]} == {"entity"}


@pytest.mark.parametrize("setting", ["many-shot.shots=[1,1000]", "order.shots=1000"])
def test_more_shots_than_training_examples_are_refused(folder, tmp_path, setting):
    suite = setting.partition(".")[0]
    sentence = "a prompt with 1000 shots is set, and the training set of task 'trec' has"
    with pytest.raises(UserError, match=sentence):
        results(folder, tmp_path, suite, f"{suite}.tasks=[trec]", setting)


def test_the_interval_of_a_margin_is_bootstrapped_over_questions():
    """Compare the interval with that of a loop that resamples questions.

    Each resample has the same questions for all permutations.
    """
    right = np.random.default_rng(1).random((40, 5)) < np.linspace(0.3, 0.7, 5)
    records = [
        {"task": "trec", "arrangement": "random", "permutation": p, "question": q, "right": bool(r)}
        for q, row in enumerate(right)
        for p, r in enumerate(row)
    ]
    # One permutation lacks the last question, so this question counts for no permutation.
    del records[-1]
    totals = Order(data_dir=Path()).totals(records)
    random, margins = np.random.default_rng(2), []
    for _ in range(2000):
        means = right[random.integers(0, 39, 39)].mean(0)
        margins.append(means.max() - means.min())
    margin = totals["trec, random, margin"]
    assert margin.value == pytest.approx(np.ptp(right[:39].mean(0)))
    assert margin.units == 39
    expected = np.percentile(margins, (2.5, 97.5))
    assert (margin.low, margin.high) == pytest.approx(expected, abs=0.03)


def test_order_reports_best_margin_and_mean(folder, tmp_path):
    settings = ("order.shots=6", "order.permutations=3", "order.samples=4")
    found = results(folder, tmp_path, "order", *settings, targets=("plain",))
    lines = (tmp_path / "order/plain.jsonl").read_text().splitlines()[1:]
    records = [json.loads(line) for line in lines]
    assert len(records) == 2 * 3 * 4
    totals = found["totals"]["plain"]
    for each in ("random", "alternating"):
        accuracies = [
            sum(r["right"] for r in records if (r["arrangement"], r["permutation"]) == (each, p))
            / 4
            for p in range(3)
        ]
        assert totals[f"trec, {each}, best"]["value"] == max(accuracies)
        assert totals[f"trec, {each}, margin"]["value"] == max(accuracies) - min(accuracies)
        assert totals[f"trec, {each}, margin"]["items"] == 4
        mean = found["measures"][f"trec, {each}"]["targets"]["plain"]["value"]
        assert mean == pytest.approx(sum(accuracies) / 3)
        assert found["measures"][f"trec, {each}"]["targets"]["plain"]["items"] == 4
    again = results(folder, tmp_path, "order", *settings, targets=("plain",))
    assert again == found
