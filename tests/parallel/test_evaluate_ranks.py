"""Tests that ranks which share the items of an evaluation have the results of one process."""

import json
import shutil
from pathlib import Path

import pytest

from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.suites.loss import Loss
from tests.pretrained import write_pretrained
from tests.ranks import launch

ITEMS = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model and a text, and evaluate the model in one process; return the folder."""
    found = tmp_path_factory.mktemp("ranks")
    write_pretrained(found / "plain", "llama 2")
    lines = (json.dumps({"text": f"text {number} " * 9}) + "\n" for number in range(ITEMS))
    (found / "text.jsonl").write_text("".join(lines))
    data = (str(found / "text.jsonl"),)
    evaluate([found / "plain"], ["loss"], found / "one", EvaluateSettings(data=data), [])
    return found


@pytest.fixture(scope="module")
def ranks(folder) -> Path:
    """Evaluate on two ranks: once from the beginning, once from the files of three killed ranks."""
    left = folder / "left/loss"
    (left / "plain.ranks").mkdir(parents=True)
    header, *lines = (folder / "one/loss/plain.jsonl").read_text().splitlines(keepends=True)
    (left / "plain.jsonl").write_text(header + lines[2])
    for rank in range(3):
        # The killed ranks left items 0 to 4 in their own files, and item 2 also in the shared file.
        # The last line of rank 0 is unfinished.
        own = header + "".join(lines[rank:5:3])
        (left / f"plain.ranks/{rank:05d}.jsonl").write_text(own if rank else own + '{"item": "te')
    shutil.copytree(folder / "left", folder / "left_to_one")
    text, plain = str(folder / "text.jsonl"), str(folder / "plain")
    calls = [[text, str(folder / out), plain] for out in ("two", "left")]
    launch(2, "tests.parallel.evaluate_worker", *calls)
    return folder


def results(out: Path) -> dict:
    return json.loads((out / "results.json").read_text())["suites"]["loss"]["measures"]


def asked_by_ranks(out: Path) -> list[list[str]]:
    return [Path(f"{out}.asked_{rank}").read_text().splitlines() for rank in range(2)]


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*")}


def test_two_ranks_have_the_same_results_as_one(ranks):
    assert results(ranks / "two") == results(ranks / "one")
    of_two, of_one = (ranks / out / "loss/plain.jsonl" for out in ("two", "one"))
    assert of_two.read_bytes() == of_one.read_bytes()
    assert files(ranks / "two") == files(ranks / "one")
    assert asked_by_ranks(ranks / "two") == [
        [f"text/{number}" for number in range(rank, ITEMS, 2)] for rank in range(2)
    ]


def test_an_evaluation_resumes_on_fewer_ranks(ranks, monkeypatch):
    expected = results(ranks / "one")
    assert results(ranks / "left") == expected
    # The two ranks scored only the items that the killed ranks had not scored.
    assert asked_by_ranks(ranks / "left") == [["text/5"], ["text/6"]]
    asked, score = [], Loss.score
    monkeypatch.setattr(
        Loss, "score", lambda *given: (asked.append(given[2].key), score(*given))[1]
    )
    data = (str(ranks / "text.jsonl"),)
    for out in ("left", "left_to_one"):
        evaluate([ranks / "plain"], ["loss"], ranks / out, EvaluateSettings(data=data), [])
        lines = (ranks / out / "loss/plain.jsonl").read_text().splitlines()
        assert set(lines) == set((ranks / "one/loss/plain.jsonl").read_text().splitlines())
        assert len(lines) == 1 + ITEMS
        assert not (ranks / out / "loss/plain.ranks").exists()
        assert results(ranks / out) == expected
    assert asked == ["text/5", "text/6"]
