"""Mathematics: data sets in their published form, the prompt, and what counts as right."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suites.math import BENCHMARKS, is_right
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained

GSM8K = [
    {"question": "2 and 3?", "answer": "It is 2+3=<<2+3=5>>5.\n#### 5"},
    {"question": "A thousand and one?", "answer": "One more.\n#### 1,001"},
]
SVAMP = [
    {"Body": "Ann has 3 pens", "Question": "How many?", "Answer": 3.0, "ID": "chal-1"},
    {"Body": "Bo has 2. ", "Question": "Half of it?", "Answer": 0.5, "ID": "chal-2"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("math")
    write_pretrained(found / "plain", "llama 2", max_position_embeddings=400)
    for split in ("train", "test"):
        lines = (json.dumps(row) + "\n" for row in GSM8K)
        (found / f"gsm8k_{split}.jsonl").write_text("".join(lines))
    (found / "svamp.json").write_text(json.dumps(SVAMP))
    return found


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last number of a text in the place of the library."""

    def last(text: str) -> list[float]:
        return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,.]*\b", text)][-1:]

    library = SimpleNamespace(parse=last, verify=lambda gold, found: bool(found) and gold == found)
    monkeypatch.setitem(sys.modules, "math_verify", library)


def test_published_forms_are_read(folder):
    assert BENCHMARKS["gsm8k"].problems(folder) == [
        ("2 and 3?", "5", "It is 2+3=5."),
        ("A thousand and one?", "1,001", "One more."),
    ]
    assert BENCHMARKS["svamp"].problems(folder) == [
        ("Ann has 3 pens. How many?", "3", ""),
        ("Bo has 2. Half of it?", "0.5", ""),
    ]


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("gsm8k_test.jsonl", None, "does not exist; it is GSM8K's test set"),
        ("gsm8k_train.jsonl", None, "does not exist; it is GSM8K's training set; without it give"),
        ("gsm8k_test.jsonl", '{"question": "a"}', "at line 1 is damaged"),
        ("gsm8k_test.jsonl", '{"question": "a", "answer": "5"}', "line 1 has no '#### ' before"),
        ("svamp.json", "{}", r"svamp\.json is damaged"),
    ],
)
def test_missing_and_foreign_files_are_one_sentence(file, content, said, folder, tmp_path, numbers):
    for path in (*folder.glob("*.jsonl"), folder / "svamp.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=said):
        evaluate([folder / "plain"], ["math"], tmp_path / "out", {"data_dir": tmp_path}, [])


def test_answers_are_counted_and_prompts_shown(folder, tmp_path, monkeypatch, numbers):
    """A model that is right about all but one, and goes on with a question of its own."""
    prompts = []

    def answers(model, ids, limit, stop):
        prompts.append(model.target.tokenizer.decode(ids[1:]))
        said = "It is 5." if "2 and 3?" in prompts[-1].rpartition("Question: ")[2] else "0.5, so 3"
        return list(f" {said}{stop} And 7?".encode())

    monkeypatch.setattr(Model, "greedy", answers)
    settings = ["math.shots=1", "math.answer_tokens=60"]
    evaluate([folder / "plain"], ["math"], tmp_path, {"data_dir": folder}, settings)
    found = json.loads((tmp_path / "results.json").read_text())["suites"]["math"]["measures"]
    assert {name: each["targets"]["plain"]["value"] for name, each in found.items()} == {
        "gsm8k": 0.5,
        "gsm8k, share cut at the limit": 0,
        "svamp": 0.5,
        "svamp, share cut at the limit": 0,
    }
    assert prompts[2] == (
        "Question: 2 and 3?\nAnswer: It is 2+3=5.\nThe answer is 5.\n\n"
        "Question: Ann has 3 pens. How many?\nAnswer:"
    )
    records = (tmp_path / "math/plain.jsonl").read_text().splitlines()[1:]
    assert json.loads(records[0])["text"] == " It is 5."


def test_writing_stops_with_a_text(folder):
    (target,) = find_targets([folder / "plain"], folder)
    model, ids = Model(target), [1, *b"some text"]
    whole = target.tokenizer.decode(model.greedy(ids, 30))
    stop = whole[7:9]
    found = target.tokenizer.decode(model.greedy(ids, 30, stop=stop))
    assert found == whole[: whole.index(stop) + len(stop)]
    assert len(found) < len(whole)


def test_without_the_library_it_is_one_sentence(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'diffmegatron\[evaluation\]'"):
        evaluate([folder / "plain"], ["math"], tmp_path, {"data_dir": folder}, [])


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (" 16 - 3 - 4 = 9 eggs, and 9 * 2 = 18.\nThe answer is 18.", "18", True),
        (" so she makes $18 a day", "18", True),
        (" The answer is 1001", "1,001", True),
        (r" \boxed{\frac{1}{2}}", "0.5", True),
        (" It is 19.", "18", False),
        (" no idea", "18", False),
        ("", "3", False),
    ],
)
def test_answers_are_compared_as_mathematics(text, answer, expected):
    pytest.importorskip("math_verify")
    assert is_right(text, answer) == expected
