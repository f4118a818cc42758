"""Tests of the suite ``lm-eval`` against the library's own run on the same local files."""

import json
import re
import shutil
import socket
import sys
from pathlib import Path

import lm_eval
import lm_eval.tasks
import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from diffmegatron.errors import UserError
from diffmegatron.evaluation import harness
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.suites.lm_eval import LmEval
from tests.pretrained import write_pretrained

LIBRARY = Path(lm_eval.tasks.__file__).parent
WORDS = ("sun", "moon", "rain", "wind", "tree", "stone", "river", "cloud", "fire", "snow", "leaf")
# These are the seven tasks of Ye et al. (Differential Transformer). The values are the paths of the
# tasks' configs in the library.
PAPER = {
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "winogrande": "winogrande/default.yaml",
}
# These tasks have output types, filters, or metrics other than means, which the tasks of ``PAPER``
# do not have.
CONFIGS = {
    "lambada_openai": {"include": str(LIBRARY / "lambada/lambada_openai.yaml")},
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "test_split": "test",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [
            {"metric": "word_perplexity"},
            {"metric": "bits_per_byte"},
        ],
        "metadata": {"version": 7},
    },
    "sums": {
        "output_type": "generate_until",
        "training_split": "train",
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{number}}",
        "num_fewshot": 1,
        "generation_kwargs": {"until": ["a", "\n\n"], "max_gen_toks": 12, "do_sample": False},
        "filter_list": [
            {"name": "letters", "filter": [{"function": "take_first"}]},
            {
                "name": "first",
                "filter": [
                    {"function": "regex", "regex_pattern": "(.)"},
                    {"function": "take_first"},
                ],
            },
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}
TASKS = (*PAPER, *CONFIGS)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def row(task: str, number: int) -> dict:
    """Return row ``number`` of a task's data, with all columns that the task's config uses."""
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
        "lambada_openai": {"text": f"The {one} met {two} and " * number + f"the {three}"},
        # Some texts are longer than the context, so they are cut into windows.
        "rolling": {"text": f"{one} {two} {three}. " * (1 + 5 * number)},
        "sums": {"text": f"{one} and {two} are", "number": str(number)},
    }[task]


def write_config(folder: Path, task: str, **changes: object) -> None:
    """Write the config of a task, with relative paths of the task's data files.

    lm-eval resolves the paths in the working directory. The suite resolves them in ``--data-dir``.
    """
    config = {"include": str(LIBRARY / PAPER[task])} if task in PAPER else dict(CONFIGS[task])
    config |= {"task": task, "dataset_path": "json", "dataset_name": None}
    config["dataset_kwargs"] = {
        "data_files": {split: f"{task}/{split}.jsonl" for split in ("train", "validation", "test")}
    }
    (folder / f"{task}.yaml").write_text(json.dumps(config | changes))


def write_rows(path: Path, task: str, numbers: range) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row(task, number)) + "\n" for number in numbers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model, and the configs and data of all tasks.

    Many prompts are longer than the model's context of 180 tokens.
    """
    found = tmp_path_factory.mktemp("lm_eval")
    write_pretrained(found / "diff", "diffllama", max_position_embeddings=180)
    (found / "diff/chat_template.jinja").write_text(TEMPLATE)
    (found / "configs").mkdir()
    for task in TASKS:
        write_config(found / "configs", task)
        write_rows(found / "data" / task / "train.jsonl", task, range(20, 28))
        write_rows(found / "data" / task / "validation.jsonl", task, range(4))
        write_rows(found / "data" / task / "test.jsonl", task, range(4))
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def measured(folder: Path, out: Path, *settings: str, data: Path | None = None) -> dict:
    options = EvaluateSettings(data_dir=data or folder / "data")
    given = [f"lm-eval.{each}" for each in (f"include_path={folder / 'configs'}", *settings)]
    evaluate([folder / "diff"], ["lm-eval"], out, options, given)
    return json.loads((out / "results.json").read_text())["suites"]["lm-eval"]


@pytest.mark.parametrize("way", ["2 shots", "own shots", "chat template"])
def test_the_library_itself_gives_the_same_numbers(way, folder, tmp_path, monkeypatch):
    """Compare answers, metrics, standard errors, shots and versions with lm-eval's own run."""
    shots = 2 if way == "2 shots" else None
    chat = way == "chat template"
    tasks = (*PAPER, "sums") if shots else TASKS
    found = measured(
        folder,
        tmp_path,
        f"tasks=[{','.join(tasks)}]",
        *(["shots=[2]"] if shots else []),
        f"apply_chat_template={str(chat).lower()}",
    )
    lines = (tmp_path / "lm-eval/diff.jsonl").read_text().splitlines()[1:]
    records = {each["item"]: each for each in map(json.loads, lines)}
    cut = [each["cut"] for each in records.values()]
    assert any(cut) or shots is None
    assert not all(cut)

    # Another test may have set LOCAL_RANK. accelerate would then expect a launcher.
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.chdir(folder / "data")
    theirs = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder / "diff"), "dtype": "float32"},
        tasks=list(tasks),
        num_fewshot=shots,
        device="cpu",
        task_manager=TaskManager(include_defaults=False, include_path=folder / "configs"),
        bootstrap_iters=1000,
        apply_chat_template=chat,
    )
    for task, samples in theirs["samples"].items():
        for sample in samples:
            expected = [response[0] for response in sample["resps"]]
            given = records[f"{task}/{theirs['n-shot'][task]}/{sample['doc_id']}"]["answers"]
            if not isinstance(expected[0], str):
                # Compare only likelihoods. An answer is (likelihood, is_greedy), or for a rolling
                # request the likelihood alone.
                expected, given = (
                    [each[0] if isinstance(each, tuple | list) else each for each in of]
                    for of in (expected, given)
                )
                expected = pytest.approx(expected, rel=1e-5)
            assert given == expected
    values = {
        (task, key): value
        for task, of_task in theirs["results"].items()
        for key, value in of_task.items()
        if "," in key and "_stderr" not in key
    }
    details = {
        (each["task"], f"{each['metric']},{each['filter']}"): each
        for each in found["details"]["results"]["diff"]
    }
    assert details.keys() == values.keys()
    for (task, key), each in details.items():
        assert each["value"] == pytest.approx(values[task, key], rel=1e-5)
        stderr = theirs["results"][task][key.replace(",", "_stderr,")]
        assert each["stderr"] == (None if stderr == "N/A" else pytest.approx(stderr, rel=1e-4))
        assert each["shots"] == theirs["n-shot"][task]
        assert each["version"] == str(theirs["versions"][task])


def test_measures_have_a_task_its_shots_and_its_filter(folder, tmp_path):
    found = measured(folder, tmp_path, "tasks=[lambada_openai,rolling,sums]", "samples=3")
    assert list(found["measures"]) == [
        "lambada_openai, 0 shots, acc",
        "sums, 1 shots, exact_match (letters)",
        "sums, 1 shots, exact_match (first)",
    ]
    totals = found["totals"]["diff"]
    assert list(totals) == [
        "lambada_openai, 0 shots, perplexity",
        "rolling, 0 shots, word_perplexity",
        "rolling, 0 shots, bits_per_byte",
    ]
    perplexity = totals["lambada_openai, 0 shots, perplexity"]
    (stderr,) = (
        each["stderr"]
        for each in found["details"]["results"]["diff"]
        if each["metric"] == "perplexity"
    )
    assert perplexity["high"] - perplexity["value"] == pytest.approx(1.96 * stderr)
    assert found["better"]["lambada_openai, 0 shots, perplexity"] == "lower"
    assert found["better"]["lambada_openai, 0 shots, acc"] == "higher"
    assert found["measures"]["lambada_openai, 0 shots, acc"]["targets"]["diff"]["items"] == 3


def test_a_task_without_a_mean_has_totals_and_no_picture(folder, tmp_path):
    found = measured(folder, tmp_path, "tasks=[rolling]", "samples=2")
    assert list(found["totals"]["diff"]) == [
        "rolling, 0 shots, word_perplexity",
        "rolling, 0 shots, bits_per_byte",
    ]
    assert not list(tmp_path.rglob("*.png"))


def test_a_group_score_is_aggregated_from_its_tasks(folder, tmp_path, monkeypatch):
    def own_tasks_alone(names, include_path):
        return TaskManager(include_path=str(include_path), include_defaults=False)

    # A group may contain the library's own tasks, so the suite reads all of them. This takes
    # seconds, so leave them out here.
    monkeypatch.setattr(harness, "_index", own_tasks_alone)
    for task in ("piqa", "winogrande"):
        write_config(tmp_path, task)
    group = {
        "group": "both",
        "task": ["piqa", "winogrande"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
        "metadata": {"version": 2},
    }
    (tmp_path / "both.yaml").write_text(json.dumps(group))
    found = measured(folder, tmp_path / "out", "tasks=[both]", f"include_path={tmp_path}")
    each = [
        found["measures"][f"{task}, 0 shots, acc"]["targets"]["diff"]["value"]
        for task in ("piqa", "winogrande")
    ]
    assert found["totals"]["diff"]["both, 0 shots, acc"]["value"] == pytest.approx(sum(each) / 2)
    assert found["better"]["both, 0 shots, acc"] == "higher"
    assert [
        (each["version"], each["shots"])
        for each in found["details"]["results"]["diff"]
        if each["task"] == "both"
    ] == [("2", 0)]


def test_a_folder_in_data_dir_replaces_the_repository_of_its_name(folder, tmp_path, monkeypatch):
    """Check that a task of the library uses the local folder, and that nothing is downloaded."""
    repository = tmp_path / "data/allenai/ai2_arc"
    files = {"train": range(20, 28), "validation": range(4), "test": range(3)}
    for split, numbers in files.items():
        write_rows(repository / f"ARC-Easy/{split}.jsonl", "arc_easy", numbers)
    splits = [{"split": split, "path": f"ARC-Easy/{split}*"} for split in files]
    configs = {"configs": [{"config_name": "ARC-Easy", "data_files": splits}]}
    (repository / "README.md").write_text(f"---\n{json.dumps(configs)}\n---\n")
    config = {"include": str(LIBRARY / PAPER["arc_easy"]), "task": "arc_easy"}
    (tmp_path / "arc_easy.yaml").write_text(json.dumps(config))

    def refuse(*_: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    own = f"include_path={tmp_path}"
    found = measured(folder, tmp_path / "out", "tasks=[arc_easy]", own, data=tmp_path / "data")
    assert found["measures"]["arc_easy, 0 shots, acc"]["targets"]["diff"]["items"] == 3


def test_averages_and_the_papers_results_are_reported(folder, tmp_path):
    found = measured(folder, tmp_path / "all", "shots=[0,2]", "samples=2")
    values = {name: each["targets"]["diff"]["value"] for name, each in found["measures"].items()}
    for shots in (0, 2):
        of_tasks = [
            values[f"{task}, {shots} shots, {'acc_norm' if task == 'hellaswag' else 'acc'}"]
            for task in PAPER
        ]
        average = found["totals"]["diff"][f"average, {shots} shots"]
        assert average["value"] == pytest.approx(sum(of_tasks) / 7)
    one = measured(folder, tmp_path / "one", "tasks=[piqa]")
    assert one["totals"] == {"diff": {}}
    assert "0.768 / not given (3B, 1T tokens" in (tmp_path / "one/report.md").read_text()


def test_items_that_cannot_be_truncated_are_skipped_and_counted(folder, tmp_path):
    """Check the skipping of items whose choice or longest answer does not fit into the context."""
    data = tmp_path / "data"
    rows = [row("piqa", number) for number in range(3)]
    # A token is one byte, and the context has 180 tokens. lm-eval puts a space before each choice,
    # so these choices have 181 and 180 tokens, and only the first one does not fit.
    rows[0]["sol2"], rows[1]["sol1"] = "x" * 180, "x" * 179
    for split in ("train", "validation", "test"):
        write_rows(data / f"sums/{split}.jsonl", "sums", range(3))
        write_rows(data / f"piqa/{split}.jsonl", "piqa", range(3))
    (data / "piqa/validation.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    write_config(tmp_path, "piqa")
    decoding = {"until": ["a"], "max_gen_toks": 180}
    write_config(tmp_path, "sums", generation_kwargs=decoding)
    own = f"include_path={tmp_path}"
    found = measured(folder, tmp_path / "out", "tasks=[piqa,sums]", own, data=data)
    assert found["measures"]["piqa, 0 shots, acc"]["targets"]["diff"]["items"] == 2
    assert "sums, 1 shots, exact_match (first)" not in found["measures"]
    assert found["not_run"][0].startswith("diff: 4 of 6 items need a context of up to 181 tokens")


def test_a_choice_that_is_one_token_with_the_prompts_end_is_scored(folder, tmp_path, capsys):
    """Compare with transformers: "and" is a token, so "sa" + "nd" leaves no token to score."""
    shutil.copytree(folder / "diff", tmp_path / "diff")
    path = tmp_path / "diff/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    size = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] |= {"an": size + 1, "and": size + 2}
    tokenizer["model"]["merges"] = [["a", "n"], ["an", "d"]]
    path.write_text(json.dumps(tokenizer))
    config = {
        "output_type": "multiple_choice",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "joined.jsonl"}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "0",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/joined.yaml").write_text(json.dumps(config | {"task": "joined"}))
    data = tmp_path / "joined.jsonl"
    rows = [{"text": text, "choices": ["nd", "on"]} for text in ("sa", " ")]
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = measured(tmp_path, tmp_path / "out", "tasks=[joined]", data=tmp_path)
    assert found["not_run"][0].startswith("diff: 1 of 2 items have a choice that is one token")
    assert "lm-eval | loading joined (1 of 1)" in capsys.readouterr().err
    first = json.loads((tmp_path / "out/lm-eval/diff.jsonl").read_text().splitlines()[1])
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "diff").double()
    ids = torch.tensor([list(b"sand")])
    with torch.no_grad():
        losses = network(ids).logits[0, 1:3].log_softmax(-1)
    expected = float(losses[0, ord("n")] + losses[1, ord("d")])
    assert first["answers"][0][0] == pytest.approx(expected, rel=1e-5)
    for text in ("sa", ""):
        rows[1] = {"text": text, "choices": ["", "on"]}
        data.write_text("".join(json.dumps(each) + "\n" for each in rows))
        with pytest.raises(UserError, match="question 1 of task 'joined' has an empty choice"):
            measured(tmp_path, tmp_path / f"out{len(text)}", "tasks=[joined]", data=tmp_path)


def test_a_target_with_a_non_finite_likelihood_has_no_measures(folder, tmp_path):
    """Check that one question with a NaN likelihood removes the measures of both tasks."""
    shutil.copytree(folder / "diff", tmp_path / "diff")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "diff")
    with torch.no_grad():
        network.get_input_embeddings().weight[ord("~")] = torch.nan
    network.save_pretrained(tmp_path / "diff")
    for task in ("piqa", "winogrande"):
        write_config(tmp_path, task)
        rows = [row(task, number) for number in range(3)]
        if task == "piqa":
            rows[1]["goal"] = "To ~"
        data = tmp_path / "data" / task
        data.mkdir(parents=True)
        text = "".join(json.dumps(each) + "\n" for each in rows)
        for split in ("train", "validation", "test"):
            (data / f"{split}.jsonl").write_text(text)
    (tmp_path / "configs").symlink_to(tmp_path)
    found = measured(tmp_path, tmp_path / "out", "tasks=[piqa,winogrande]")
    (reason,) = found["not_run"]
    assert reason.startswith("diff: 1 of 6 items have numbers that are not finite")
    assert "piqa/0/1: the loss of" in reason
    assert found["measures"] == {}


# Bad input


@pytest.mark.parametrize(
    ("task", "changes", "settings", "said"),
    [
        ("piqa", {}, ["tasks=[piqua]"], "lm-eval has no task, group or tag 'piqua'; did you mean"),
        ("piqa", {}, ["tasks=[piqa]", "shots=[0, 0]"], "lm-eval.shots [0, 0] has a number twice"),
        (
            "piqa",
            {},
            ["tasks=[piqa, piqa]"],
            "lm-eval.tasks ['piqa', 'piqa'] contain task 'piqa' twice",
        ),
        (
            "piqa",
            {},
            ["tasks=[piqa]", "shots=[9]"],
            "lm-eval cannot build the prompts of task 'piqa' with 9 examples: ValueError: Sample",
        ),
        (
            "piqa",
            {"dataset_kwargs": {"data_files": {"validation": "none.jsonl"}}},
            ["tasks=[piqa]"],
            "lm-eval cannot load task 'piqa': FileNotFoundError: Unable to find",
        ),
        (
            "piqa",
            {"dataset_kwargs": {"data_files": {"validation": "bad.jsonl"}}},
            ["tasks=[piqa]"],
            "lm-eval cannot load task 'piqa': ",
        ),
        (
            "sums",
            {"num_fewshot": 0},
            ["tasks=[sums]", "shots=[1]"],
            "task 'sums' has num_fewshot 0 in its configuration, which lm-eval never",
        ),
        (
            "sums",
            {"generation_kwargs": {"do_sample": True, "temperature": 1.0, "until": ["a"]}},
            ["tasks=[sums]"],
            "task 'sums' of lm-eval samples tokens",
        ),
        ("sums", {"unsafe_code": True}, ["tasks=[sums]"], "runs code that the model writes"),
        ("piqa", {}, ["include_path=none"], "none is not a folder"),
    ],
)
def test_invalid_tasks_settings_and_data_are_one_line_errors(
    task, changes, settings, said, folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(lm_eval.tasks.manager, "__file__", str(tmp_path / "no/tasks.py"))
    (tmp_path / "configs").mkdir()
    write_config(tmp_path / "configs", task, **changes)
    for split in ("train", "validation", "test"):
        write_rows(tmp_path / f"data/{task}/{split}.jsonl", task, range(9))
    (tmp_path / "data/bad.jsonl").write_text('{"goal": "a"}\n{"goal')
    own = f"include_path={tmp_path / 'configs'}"
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        measured(folder, tmp_path / "out", own, *settings, data=tmp_path / "data")
    assert "\n" not in str(caught.value)


def test_a_task_on_an_unreachable_hub_is_an_error(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    write_config(tmp_path, "piqa", dataset_path="baber/piqa", dataset_kwargs=None)
    with pytest.raises(UserError, match=r"cannot load task 'piqa'.*must be on Hugging Face's hub"):
        measured(folder, tmp_path / "out", "tasks=[piqa]", f"include_path={tmp_path}")


def test_a_missing_chat_template_is_an_error(folder, tmp_path):
    write_pretrained(tmp_path / "diff", "diffllama")
    (tmp_path / "configs").symlink_to(folder / "configs")
    with pytest.raises(UserError, match="has no chat template; leave out"):
        measured(
            tmp_path,
            tmp_path / "out",
            "tasks=[piqa]",
            "apply_chat_template=true",
            data=folder / "data",
        )


def test_a_missing_lm_eval_is_an_error_with_the_install_command(folder, tmp_path, monkeypatch):
    monkeypatch.delattr("diffmegatron.evaluation.harness", raising=False)
    monkeypatch.setitem(sys.modules, "diffmegatron.evaluation.harness", None)
    with pytest.raises(UserError, match=r"pip install 'diffmegatron\[evaluation\]'"):
        measured(folder, tmp_path, "tasks=[piqa]")


def test_the_papers_tasks_are_the_default():
    assert LmEval.model_validate({}).tasks == tuple(PAPER)
