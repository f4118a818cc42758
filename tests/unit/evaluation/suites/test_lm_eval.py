"""lm-eval's tasks on local data: the library's own run on the same files gives the same numbers."""

import json
import re
import socket
import sys
from pathlib import Path

import lm_eval
import lm_eval.tasks
import pyarrow
import pyarrow.parquet
import pytest
from lm_eval.tasks import TaskManager

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.multiple_choice import QUESTIONS
from tests.pretrained import write_pretrained
from tests.unit.evaluation.stand_ins import answering

WORDS = [
    "sun",
    "moon",
    "rain",
    "wind",
    "tree",
    "stone",
    "river",
    "cloud",
    "fire",
    "snow",
    "leaf",
    "root",
]
# Where the library keeps the tasks' prompts.
YAML = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
}
SPLITS = {"train": 8, "validation": 4, "test": 4}


def row(task: str, number: int) -> dict:
    """A row of a task's columns, and of one more."""
    one, two, three, four = (WORDS[(number * step + step) % len(WORDS)] for step in (1, 2, 3, 5))
    four = "a longer choice of " + four
    labels = ["A", "B", "C", "D"] if number % 2 else ["1", "2", "3", "4"]
    choices = {"text": [one, f"{two} and ä", three, four], "label": labels}
    labelled = {"id": f"row {number}", "choices": choices, "answerKey": labels[number % 4]}
    return {
        "arc_challenge": {"question": f"Is it {one} {number}?", **labelled},
        "arc_easy": {"question": f"What is {two}?", **labelled},
        "boolq": {
            "question": f"is {one} a {two}",
            "passage": f"A {three} is {number}. " * (1 + 4 * number % 3),
            "idx": number,
            "label": number % 2,
        },
        "hellaswag": {
            "ind": number,
            "activity_label": f"Making {one}",
            "ctx_a": f"[header] {two} begins.",
            "ctx_b": "they" if number % 2 else "",
            "ctx": "not read",
            "endings": [f"see {each} [title] there  ." for each in (one, two, three, four)],
            "label": str(number % 4),
        },
        "openbookqa": {"question_stem": f"{one} {number} makes", **labelled},
        "piqa": {"goal": f"To {one}", "sol1": f"{two}.", "sol2": four, "label": number % 2},
        "winogrande": {
            "sentence": f"The {one} hit the {two} as _ was {number}.",
            "option1": one,
            "option2": f"the {two}",
            "answer": str(1 + number % 2),
        },
    }[task]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context many prompts with examples exceed, and all sets, some in Parquet."""
    found = tmp_path_factory.mktemp("lm_eval")
    write_pretrained(found / "diff", "diffllama", max_position_embeddings=180)
    for task, questions in QUESTIONS.items():
        place = found / "data" / questions.folder / ("plain_text" if task == "piqa" else "")
        place.mkdir(parents=True)
        for split, count in SPLITS.items():
            rows = [row(task, number + 20 * (split == "train")) for number in range(count)]
            if task in ("boolq", "arc_easy"):
                table = pyarrow.Table.from_pylist(rows)
                pyarrow.parquet.write_table(table, place / f"{split}-00000-of-00001.parquet")
            else:
                lines = "".join(json.dumps(each) + "\n" for each in rows)
                (place / f"{split}.jsonl").write_text(lines)
    return found


def measured(folder: Path, out: Path, *settings: str) -> dict:
    options = {"data_dir": folder / "data"}
    evaluate([folder / "diff"], ["lm-eval"], out, options, [f"lm-eval.{each}" for each in settings])
    return json.loads((out / "results.json").read_text())["suites"]["lm-eval"]


@pytest.fixture(scope="module")
def out(folder, tmp_path_factory) -> Path:
    """Of all tasks after 0 and 2 examples."""
    found = tmp_path_factory.mktemp("out")
    measured(folder, found, "shots=[0,2]")
    return found


@pytest.fixture
def found(out) -> dict:
    return json.loads((out / "results.json").read_text())["suites"]["lm-eval"]


@pytest.fixture
def library_tasks(folder, tmp_path, monkeypatch) -> Path:
    """The tasks as the library itself reads them from the files."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    root = Path(lm_eval.tasks.__file__).parent
    for task, questions in QUESTIONS.items():
        files = sorted((folder / "data" / questions.folder).rglob("*.*"))
        of_split = {path.name.split(".")[0].split("-")[0]: str(path) for path in files}
        config = {
            "include": str(root / YAML[task]),
            "task": task,
            "dataset_path": "parquet" if files[0].suffix == ".parquet" else "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": of_split, "cache_dir": str(tmp_path / "cache")},
        }
        (tmp_path / f"{task}.yaml").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("shots", [0, 2])
def test_the_library_itself_gives_the_same_numbers(
    shots, folder, out, found, library_tasks, monkeypatch
):
    """Of prompts that lose their beginning too, and choices that one prediction has in common."""
    # Which a run of another test may have set; accelerate takes it for a launcher.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    lines = (out / "lm-eval/diff.jsonl").read_text().splitlines()[1:]
    records = {each["item"]: each for each in map(json.loads, lines)}
    cut = [each["cut"] > 0 for each in records.values() if each["shots"] == shots]
    assert any(cut) == (shots == 2)
    assert not all(cut)
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "diff"), "dtype": "float32"},
        tasks=list(QUESTIONS),
        num_fewshot=shots,
        device="cpu",
        task_manager=TaskManager(include_defaults=False, include_path=library_tasks),
        bootstrap_iters=0,
    )
    for task, samples in theirs["samples"].items():
        for sample in samples:
            expected = [float(response[0][0]) for response in sample["resps"]]
            given = records[f"{task}/{shots}/{sample['doc_id']}"]["likelihoods"]
            assert given == pytest.approx(expected, rel=1e-5)
    values = {
        f"{task}, {shots} shots, {metric}": of_task[f"{metric},none"]
        for task, of_task in theirs["results"].items()
        for metric in ("acc", "acc_norm")
        if f"{metric},none" in of_task
    }
    # BoolQ and WinoGrande have no acc_norm.
    assert len(values) == 12
    for measure, value in values.items():
        assert found["measures"][measure]["targets"]["diff"]["value"] == value, measure


def test_nothing_is_fetched(folder, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    measured(folder, tmp_path, "shots=[1]", "samples=1", "tasks=[hellaswag,piqa]")


def test_averages_stand_beside_the_papers(found, folder, tmp_path):
    values = {name: each["targets"]["diff"]["value"] for name, each in found["measures"].items()}
    for shots in (0, 2):
        of_tasks = [
            values[f"{task}, {shots} shots, {'acc_norm' if task == 'hellaswag' else 'acc'}"]
            for task in QUESTIONS
        ]
        average = found["totals"]["diff"][f"average, {shots} shots"]
        assert average["value"] == pytest.approx(sum(of_tasks) / 7)
    assert measured(folder, tmp_path, "shots=[0]", "tasks=[piqa]")["totals"] == {"diff": {}}
    report = (tmp_path / "report.md").read_text()
    assert "0.768 / not given (3B, 1T tokens" in report


def test_a_choice_that_is_longer_than_the_context_is_left_out_and_counted(folder, tmp_path):
    data = tmp_path / "data/piqa/plain_text"
    data.mkdir(parents=True)
    rows = [row("piqa", number) for number in range(3)]
    # The model reads bytes, and has a context of 180. lm-eval puts a space before the choice.
    rows[0]["sol2"], rows[1]["sol1"] = "x" * 180, "x" * 179
    (data / "validation.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    settings = ["lm-eval.tasks=[piqa]", "lm-eval.shots=[0]"]
    evaluate([folder / "diff"], ["lm-eval"], tmp_path, {"data_dir": tmp_path / "data"}, settings)
    found = json.loads((tmp_path / "results.json").read_text())["suites"]["lm-eval"]
    assert found["measures"]["piqa, 0 shots, acc"]["targets"]["diff"]["items"] == 2
    assert found["not_run"][0].startswith("diff: 1 of 3 items need a context of up to 181 tokens")


def test_an_accuracy_tells_a_model_that_knows(folder, tmp_path, monkeypatch):
    """Likelihoods of choices that are right, and the same ones in another order."""
    from diffmegatron.evaluation.harness import Network

    def right(self, requests):
        gold = [row("piqa", number)["label"] for number in range(4)]
        number = next(n for n in range(4) if row("piqa", n)["sol1"] in requests[0][1])
        return [(-float(place != gold[number]), False) for place in range(2)]

    monkeypatch.setattr(Network, "likelihoods", right)
    settings = ("shots=[0]", "tasks=[piqa]")
    good = measured(folder, tmp_path / "good", *settings)["measures"]["piqa, 0 shots, acc"]
    monkeypatch.setattr(Network, "likelihoods", lambda *given: right(*given)[::-1])
    bad = measured(folder, tmp_path / "bad", *settings)["measures"]["piqa, 0 shots, acc"]
    assert (good["targets"]["diff"]["value"], bad["targets"]["diff"]["value"]) == (1, 0)


# Prompts that the questions were put into

_ASK = "Please choose the correct answer to the question: "
_FOUR = "\n\nAnswer format: answer1/answer2/answer3/answer4"
INSTRUCTIONS = {
    "arc_easy": (f"{_ASK}What?\n\nAnswer1: a b Answer2: c.{_FOUR}", "answer2"),
    "openbookqa": (f"{_ASK}It is\n\nAnswer1: a Answer2: b Answer3: c{_FOUR}", "answer1"),
    "boolq": (
        "Please answer the following question with true or false, question: is it?\n\n"
        "Answer format: true/false",
        "true",
    ),
    "piqa": (
        "Please choose the correct solution to the question: To do\n\nSolution1: x \n\n"
        "Solution2: y\n\nAnswer format: solution1/solution2",
        "solution2",
    ),
    "winogrande": (
        "Please choose the correct answer to fill in the blank to complete the given sentence: "
        "As _ was.\n\nOption1: he Option2: she Answer format: option1/option2",
        "option1",
    ),
}
LABELS = ["1", "2", "3"]
PARSED = {
    "arc_easy": {
        "question": "What?",
        "choices": {"text": ["a b", "c."], "label": LABELS[:2]},
        "answerKey": "2",
    },
    "openbookqa": {
        "question_stem": "It is",
        "choices": {"text": ["a", "b", "c"], "label": LABELS},
        "answerKey": "1",
    },
    "boolq": {"question": "is it", "passage": "", "label": 1},
    "piqa": {"goal": "To do", "sol1": "x ", "sol2": "y", "label": 1},
    "winogrande": {"sentence": "As _ was.", "option1": "he", "option2": "she", "answer": "1"},
}


@pytest.mark.parametrize("task", INSTRUCTIONS)
def test_instructions_are_read_back_into_rows(task, tmp_path):
    instruction, answer = INSTRUCTIONS[task]
    prompt = {"instruction": instruction, "input": "", "output": "", "answer": answer}
    path = tmp_path / f"{task}_test.json"
    path.write_text(json.dumps([prompt]))
    (parsed,) = QUESTIONS[task].read(tmp_path, task)
    assert parsed == PARSED[task]
    QUESTIONS[task].row.model_validate(parsed)
    for wrong in ({"answer": "answer7"}, {"instruction": "What?"}):
        path.write_text(json.dumps([prompt, prompt | wrong]))
        with pytest.raises(UserError, match="has no question in prompt 2, or no answer"):
            QUESTIONS[task].read(tmp_path, task)


def test_boolq_without_passages_is_called_that(folder, tmp_path):
    instruction, answer = INSTRUCTIONS["boolq"]
    (tmp_path / "boolq_test.json").write_text(
        json.dumps([{"instruction": instruction, "answer": answer}])
    )
    settings = ["lm-eval.shots=[0]", "lm-eval.tasks=[boolq]"]
    evaluate([folder / "diff"], ["lm-eval"], tmp_path / "out", {"data_dir": tmp_path}, settings)
    found = json.loads((tmp_path / "out/results.json").read_text())["suites"]["lm-eval"]
    assert list(found["measures"]) == ["boolq without passages, 0 shots, acc"]
    assert "boolq: its file has no passages" in found["not_run"][0]


# Bad input


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["tasks=[hellaswag]", "shots=[0]"],
            "has no validation*.parquet or validation*.jsonl, the "
            "validation files of Rowan/hellaswag on Hugging Face's hub",
        ),
        (["tasks=[piqa]", "shots=[0]"], "nor is there piqa_test.json, lists of instruction"),
        (
            ["tasks=[openbookqa]"],
            "has no train*.parquet or train*.jsonl, the train files of "
            "allenai/openbookqa on Hugging Face's hub; examples are drawn from them: without them",
        ),
        (["tasks=[piqua]"], "task 'piqua' is unknown; give some of arc_challenge"),
        (["tasks=[piqa]", "shots=[0, 0]"], "lm-eval.shots [0, 0] name one twice; give each once"),
        (["tasks=[arc_easy]", "shots=[0]"], "at line 2 is damaged"),
        (["tasks=[arc_challenge]", "shots=[0]"], "answerKey 'E' is not one of the labels"),
    ],
)
def test_what_is_missing_or_wrong_is_one_sentence(settings, said, folder, tmp_path):
    data = tmp_path / "data"
    for task, text in (
        ("openbookqa", json.dumps(row("openbookqa", 0))),
        ("arc_easy", json.dumps(row("arc_easy", 0)) + '\n{"question": "a"}'),
        ("arc_challenge", json.dumps(row("arc_challenge", 0) | {"answerKey": "E"})),
    ):
        (data / QUESTIONS[task].folder).mkdir(parents=True)
        (data / QUESTIONS[task].folder / "test-00000-of-00001.jsonl").write_text(text)
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        evaluate(
            [folder / "diff"],
            ["lm-eval"],
            tmp_path / "out",
            {"data_dir": data},
            [f"lm-eval.{each}" for each in settings],
        )
    assert "\n" not in str(caught.value)


def test_more_shots_than_examples_are_refused(folder, tmp_path):
    with pytest.raises(UserError, match="9 shots of piqa are drawn from more than 9 examples"):
        measured(folder, tmp_path, "shots=[9]", "tasks=[piqa]")


def test_without_the_library_it_is_one_sentence(folder, tmp_path, monkeypatch):
    monkeypatch.delattr("diffmegatron.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "diffmegatron.evaluation.harness", None)
    with pytest.raises(UserError, match=r"pip install 'diffmegatron\[evaluation\]'"):
        measured(folder, tmp_path, "shots=[0]", "tasks=[piqa]")


def test_what_is_not_finite_is_named(folder, tmp_path, monkeypatch):
    error = NotFiniteError("the loss of token 3 of 5 is not finite")
    monkeypatch.setattr(Model, "answers", answering(lambda *_: error))
    found = measured(folder, tmp_path, "shots=[0]", "tasks=[piqa]")
    assert found["measures"] == {}
    assert "the first is piqa/0/0: the loss of token 3" in found["not_run"][0]
