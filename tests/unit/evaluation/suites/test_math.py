"""Tests of the suite ``math``: published data sets, prompts and the comparison of answers."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Generation
from diffmegatron.evaluation.suites.math import BENCHMARKS, is_right
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained
from tests.unit.evaluation.stand_ins import answering

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
    """Replace the library math_verify by a stand-in that compares the last number of each text."""

    def last(text: str) -> list[float]:
        return [float(each.replace(",", "")) for each in re.findall(r"\d[\d,.]*\b", text)][-1:]

    library = SimpleNamespace(parse=last, verify=lambda gold, found: bool(found) and gold == found)
    monkeypatch.setitem(sys.modules, "math_verify", library)


def test_published_forms_are_read(folder):
    assert BENCHMARKS["gsm8k"].examples(folder) == [
        ("2 and 3?", "5", "It is 2+3=5.", ()),
        ("A thousand and one?", "1,001", "One more.", ()),
    ]
    assert BENCHMARKS["svamp"].examples(folder) == [
        ("Ann has 3 pens. How many?", "3", "", ()),
        ("Bo has 2. Half of it?", "0.5", "", ()),
    ]


# All TabMWP items below have these keys and values.
TABLE = {"table_title": "Sales", "table": "Day | Cups\nMon | 5", "unit": None, "ans_type": "x"}
# Each benchmark has a pair: its items in the published form, and the tuples (question, answer,
# choices) that must be read from these items. A tuple for an item without choices omits them.
PUBLISHED = {
    "math": (
        [
            {
                "problem": "1/2?",
                "solution": r"$\boxed{1}$? No, $\boxed{\frac{1}{2}}$.",
                "level": "1",
            },
            {"problem": "3?", "solution": r"So \boxed{3}.", "type": "Algebra"},
        ],
        [("1/2?", r"$\frac{1}{2}$"), ("3?", "3")],
    ),
    "asdiv": (
        [
            {
                "body": "7 red apples.",
                "question": "How many?",
                "answer": "7 (apples)",
                "formula": "7=7",
            }
        ],
        [("7 red apples. How many?", "7")],
    ),
    "mawps": (
        [
            {"iIndex": 1, "sQuestion": " 2 and 3? ", "lEquations": ["X=2+3"], "lSolutions": [5.0]},
            {"input": "Half?", "target": 0.5},
        ],
        [("2 and 3?", "5"), ("Half?", "0.5")],
    ),
    "carp": ([{"content": "x?", "answer": "x=2", "steps": "2"}], [("x?", "$x=2$")]),
    "tabmwp": (
        {
            "1": TABLE | {"question": "Cups?", "choices": None, "answer": "5"},
            "7": TABLE | {"question": "Day?", "choices": ["Sun", "Mon"], "answer": "Mon"},
        },
        [
            ("The table of Sales:\nDay | Cups\nMon | 5\nCups?", "5"),
            (
                "The table of Sales:\nDay | Cups\nMon | 5\nDay? Choose from: Sun, Mon.",
                "Mon",
                ("Sun", "Mon"),
            ),
        ],
    ),
    "college-math": (
        [{"question": "Integrate.", "answer": "$x^2$", "data_source": "b", "question_number": "1"}],
        [("Integrate.", "$x^2$")],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_other_published_forms_are_read(name, tmp_path):
    rows, expected = PUBLISHED[name]
    benchmark = BENCHMARKS[name]
    lines = isinstance(rows, list)
    text = "".join(json.dumps(row) + "\n" for row in rows) if lines else json.dumps(rows)
    (tmp_path / benchmark.file).write_text(text)
    found = [(each.question, each.answer, each.choices) for each in benchmark.examples(tmp_path)]
    assert found == [each if each[2:] else (*each, ()) for each in expected]
    assert set(BENCHMARKS) == {*PUBLISHED, "gsm8k", "svamp"}


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("gsm8k_test.jsonl", None, "does not exist .*; it must be GSM8K.s test set"),
        ("gsm8k_train.jsonl", None, "does not exist .*training set .not needed with math.shots=0"),
        ("gsm8k_test.jsonl", '{"question": "a"}', "at line 1 is damaged"),
        ("gsm8k_test.jsonl", '{"question": "a", "answer": "5"}', "line 1 has no '#### ' before"),
        ("svamp.json", "{}", r"svamp\.json is damaged"),
        ("math_test.jsonl", '{"problem": "a", "solution": "b"}', "line 1 has no answer in .boxed"),
        (
            "tabmwp_test.json",
            json.dumps({"3": TABLE | {"question": "a", "choices": ["b"], "answer": "c"}}),
            "at row 3 has the answer .c.; it must be one of its choices",
        ),
    ],
)
def test_missing_and_foreign_files_are_errors(file, content, said, folder, tmp_path, numbers):
    for path in (*folder.glob("*.jsonl"), folder / "svamp.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_text(content)
    own = [name for name in ("math", "tabmwp") if file.startswith(name)]
    settings = [f"math.benchmarks=[{','.join(own or ['gsm8k', 'svamp'])}]"]
    with pytest.raises(UserError, match=said):
        evaluate(
            [folder / "plain"],
            ["math"],
            tmp_path / "out",
            EvaluateSettings(data_dir=tmp_path),
            settings,
        )


def test_answers_are_counted_and_prompts_shown(folder, tmp_path, monkeypatch, numbers):
    """Check that the accuracy is 0.5 if one of two answers per benchmark is correct.

    The stand-in model writes a stop string and another question after each answer. The suite must
    cut them off.
    """
    prompts = []

    def answer(model, request):
        prompt = model.target.tokenizer.decode(request.ids[1:])
        prompts.append(prompt)
        # ``request.shared`` is the number of tokens before the last question.
        assert prompt[request.shared - 1 :].startswith("Question: ")
        assert prompt[request.shared :].count("Question: ") == 0
        said = "It is 5." if "2 and 3?" in prompt.rpartition("Question: ")[2] else "0.5, so 3"
        return list(f" {said}{request.stop[0]} And 7?".encode())

    monkeypatch.setattr(Model, "answers", answering(answer))
    settings = ["math.shots=1", "math.answer_tokens=60", "math.benchmarks=[gsm8k,svamp]"]
    evaluate([folder / "plain"], ["math"], tmp_path, EvaluateSettings(data_dir=folder), settings)
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


def test_generation_ends_after_a_stop_string(folder):
    (target,) = find_targets([folder / "plain"], folder)
    model, ids = Model(target), [1, *b"some text"]
    ((_, tokens),) = model.answers([Generation(ids, 30)])
    whole = target.tokenizer.decode(tokens)
    stop = whole[7:9]
    ((_, tokens),) = model.answers([Generation(ids, 30, (stop,))])
    found = target.tokenizer.decode(tokens)
    assert found == whole[: whole.index(stop) + len(stop)]
    assert len(found) < len(whole)


def test_a_missing_math_verify_is_an_error_with_the_install_command(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"pip install 'diffmegatron\[evaluation\]'"):
        evaluate([folder / "plain"], ["math"], tmp_path, EvaluateSettings(data_dir=folder), [])


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (" 16 - 3 - 4 = 9 eggs, and 9 * 2 = 18.\nThe answer is 18.", "18", True),
        (" so she makes $18 a day", "18", True),
        (" The answer is 1001", "1,001", True),
        (r" \boxed{\frac{1}{2}}", "0.5", True),
        (" The answer is 0.5.", r"$\frac{1}{2}$", True),
        (r" The answer is $x=2$.", "$x=2$", True),
        (r" The answer is $2x$.", "$x^2$", False),
        (" It is 19.", "18", False),
        (" no idea", "18", False),
        ("", "3", False),
    ],
)
def test_answers_are_compared_as_mathematics(text, answer, expected):
    assert is_right(text, answer) == expected


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (" It is Mon, not Sun. The answer is Mon.", "Mon", True),
        (" The answer is sun", "Sun", True),
        (" The answer is Mon.", "Sun", False),
        (" Monday", "Mon", False),
        ("", "Sun", False),
        (" The answer is late Mon", "Mon", False),
        (" The answer is late Mon", "late Mon", True),
    ],
)
def test_the_last_named_choice_counts_as_the_answer(text, answer, expected):
    assert is_right(text, answer, ("Sun", "Mon", "late Mon")) == expected
