"""Tasks of EleutherAI's lm-eval, with the prompts, filters and metrics of lm-eval.

lm-eval is installed with the extra ``evaluation`` of this package.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_bars
from diffmegatron.evaluation.requests import ItemGenerator
from diffmegatron.evaluation.suite import (
    Direction,
    Estimate,
    Item,
    Mean,
    Published,
    Record,
    Records,
    Suite,
)
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path
from diffmegatron.section import Count

if TYPE_CHECKING:
    from diffmegatron.evaluation.harness import Question, Tasks
    from diffmegatron.evaluation.lm_eval_encoder import Encoder

_TABLE = "3B, 1T tokens, accuracy of a kind that the paper does not name"
# Task -> (metric, accuracy of the 3B differential model of Ye et al.). The paper does not name the
# metrics. On HellaSwag, models of this size reach the paper's accuracy only with acc_norm.
_PAPER = {
    "arc_challenge": ("acc", 0.378),
    "arc_easy": ("acc", 0.729),
    "boolq": ("acc", 0.69),
    "hellaswag": ("acc_norm", 0.714),
    "openbookqa": ("acc", 0.29),
    "piqa": ("acc", 0.768),
    "winogrande": ("acc", 0.671),
}
# Half width of the 95% interval of a normal distribution, in standard errors.
_ERRORS_OF_95 = 1.96


class LmEval(Suite):
    """Tasks of the installed lm-eval, on local files or files of Hugging Face's hub.

    EleutherAI's lm-eval, of the extra ``evaluation``, creates the prompts and random examples (seed
    1234), and computes the metrics and standard errors. On a CPU, its own command computes the same
    numbers from an exported FOLDER (``lm_eval run --model hf --model_args
    pretrained=FOLDER,dtype=float32``). This is the only suite that downloads data, unless they are
    local:

    - A folder in ``--data-dir`` with the name of a repository replaces the repository. For MMLU,
      create it in ``--data-dir`` with ``hf download --repo-type dataset cais/mmlu --local-dir
      cais/mmlu``.
    - ``include_path`` is a folder with configurations of tasks in the library's own format. They
      can name local files, relative to ``--data-dir``. A configuration can ``include`` another one,
      and name Python functions in files beside it. These functions are run, so use only folders
      that you trust.

    With this file as ``tasks/local.yaml``, ``--set lm-eval.include_path=tasks --set
    "lm-eval.tasks=[local]"`` reads LAMBADA from ``--data-dir``:

        group: local
        task:
          - task: lambada_openai
            dataset_path: json
            dataset_name: null
            dataset_kwargs: {data_files: {test: lambada_test.jsonl}}

    The command prints which task it loads. If the hub cannot be reached, a task without local data
    ends the command with an error before the first item. The library ``datasets`` tries for half a
    minute, unless ``HF_HUB_OFFLINE=1`` is set. It caches data in ``HF_DATASETS_CACHE``. Tasks with
    pictures or sound, tasks that run generated code, and tasks that sample tokens are not
    supported.

    A prompt that is longer than the context is cut at its beginning, as in lm-eval. If a choice, or
    the space for the answer, is longer than the context, the question is left out (lm-eval's own
    command stops). If one token spans the end of the prompt and the whole choice, the choice is
    encoded by itself (lm-eval's own command stops). The report has the number of each. A token that
    spans the end of the prompt and a part of the choice belongs to the prompt, as in lm-eval.

    Means over documents have bootstrap intervals and differences. For other metrics, and for
    groups, the interval is the value plus and minus 1.96 of lm-eval's standard errors. A standard
    error without a formula comes from a bootstrap of 1,000 resamples (100,000 in lm-eval's own
    command), or 100 for ``bleu``, ``chrf``, ``chrf++`` and ``ter``. ``details`` in ``results.json``
    has the value and the standard error of every task, metric and filter, and the version of the
    task.

    *Deviation*: the paper does not say which tasks use ``acc_norm``. The report compares the
    paper's number for HellaSwag with ``acc_norm``, and its other numbers with ``acc``.
    """

    name = "lm-eval"
    title = "LM Eval Harness"
    description = (
        "Tasks of EleutherAI's lm-eval. In a multiple-choice task the answer is the choice with "
        "the highest likelihood (acc), or the highest likelihood per byte (acc_norm). In tasks "
        "with one continuation, such as LAMBADA, acc is the share of continuations that are the "
        "likeliest at every token. Brackets contain the filter that extracts an answer from a "
        "text. Measures without an item have intervals of 1.96 standard errors."
    )
    published = (
        *(
            Published(f"{task}, 0 shots, {metric}", value, None, _TABLE)
            for task, (metric, value) in _PAPER.items()
        ),
        Published("average, 0 shots", 0.562, 0.554, "3B, 350B tokens"),
        Published("average, 5 shots", 0.58, 0.564, "3B, 350B tokens"),
    )

    data_dir: Path = Field(default=Path(), description="folder with data files")
    include_path: Path | None = Field(default=None, description="folder with task configurations")
    tasks: tuple[str, ...] = Field(
        default=tuple(_PAPER), min_length=1, description="tasks, groups and tags of lm-eval"
    )
    shots: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=None,
        min_length=1,
        description="examples before a question; by default each task's own number",
    )
    samples: Count | None = Field(
        default=None, description="number of questions per task (null: all)"
    )
    apply_chat_template: bool = Field(
        default=False,
        description="render prompts with the tokenizer's chat template; examples become turns",
    )

    @override
    def check(self, target: Target) -> None:
        _harness()
        if self.shots is not None and len({*self.shots}) < len(self.shots):
            raise UserError(f"lm-eval.shots {list(self.shots)} has a number twice; give each once")
        encoder = _encoder(target)
        if self.apply_chat_template and not encoder.tokenizer.chat_template:
            raise UserError(
                f"the tokenizer of {format_path(target.folder)} has no chat template; leave out "
                "lm-eval.apply_chat_template"
            )
        self._questions(target)

    @override
    def items(self, target: Target) -> list[Item]:
        encoder = _encoder(target)
        return [
            Item(f"{each.task}/{each.shots}/{each.number}", encoder.length(each), each)
            for each in self._questions(target)
        ]

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        question: Question = item.content
        encoder = _encoder(target)
        requests, notes = encoder.requests(question)
        answers = encoder.answers(question, (yield requests))
        return {
            "task": question.task,
            "shots": question.shots,
            "answers": answers,
            "metrics": self._library.metrics(question, answers),
            **notes,
        }

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        return {
            _measure(record["task"], record["shots"], key): Mean(value)
            for key, value in record["metrics"].items()
            if self._library.is_mean(record["task"], key)
        }

    @override
    def totals(self, records: Records) -> dict[str, float | Estimate]:
        """Return metrics of task groups, metrics that are not means, and an average accuracy.

        The average is over the seven tasks of ``_PAPER``, and missing if one is not evaluated.
        """
        totals: dict[str, float | Estimate] = {}
        for row in self._results(records):
            name, key, value = row["task"], f"{row['metric']},{row['filter']}", row["value"]
            if name in self._library.groups or not self._library.is_mean(name, key):
                error = None if row["stderr"] is None else _ERRORS_OF_95 * row["stderr"]
                low, high = (None, None) if error is None else (value - error, value + error)
                totals[_measure(name, row["shots"], key)] = Estimate(value, low, high, None)
        for shots in dict.fromkeys(record["shots"] for record in records):
            each = [_accuracy(records, name, shots, metric) for name, (metric, _) in _PAPER.items()]
            values = [value for value in each if value is not None]
            if len(values) == len(_PAPER):
                totals[f"average, {shots} shots"] = float(np.mean(values))
        return totals

    @override
    def details(self, records: Mapping[str, Records]) -> dict[str, Any]:
        results = {target: list(self._results(each)) for target, each in records.items()}
        return {"lm_eval": version("lm_eval"), "results": results}

    @override
    def remarks(self, records: Mapping[str, Records]) -> list[str]:
        sentences = []
        for target, of_target in records.items():
            if cut := sum(bool(record["cut"]) for record in of_target):
                sentences.append(
                    f"{target}: {cut} of {len(of_target)} items were longer than its context and "
                    "lost the beginning of the prompt, as in lm-eval"
                )
            # Records of earlier versions lack the key, because such an item ended the evaluation.
            if joined := sum(bool(record.get("joined")) for record in of_target):
                sentences.append(
                    f"{target}: {joined} of {len(of_target)} items have a choice that is one token "
                    "with the end of the prompt, so the choice was encoded by itself; lm-eval's "
                    "own command stops there"
                )
        return sentences

    @override
    def better(self, measure: str) -> Direction | None:
        name, _, rest = measure.partition(", ")
        if name == "average":
            return "higher"
        metric = rest.partition(", ")[2].partition(" (")[0]
        return self._library.better(name, metric)

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        """Draw a panel per number of shots, with the first metric of each group or task."""
        bars_of = {target: self._bars(each) for target, each in records.items()}
        panels: dict[str, list[str]] = {}
        for shots, name in dict.fromkeys(key for bars in bars_of.values() for key in bars):
            panels.setdefault(shots, []).append(name)
        if not panels:
            return False
        figure.set_size_inches(max(7.5, 0.9 * max(map(len, panels.values()))), 3.4 * len(panels))
        grid = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (shots, names) in zip(grid, panels.items(), strict=True):
            bars = {target: [own.get((shots, n)) for n in names] for target, own in bars_of.items()}
            plot_bars(axes, [n.replace("_", "\n") for n in names], bars, "first metric of the task")
            axes.set(title=shots)
        return True

    def _bars(self, records: Records) -> dict[tuple[str, str], Estimate]:
        """Return (shots, name) -> first metric of a group or task.

        Tasks of a group that has metrics of its own are left out.
        """
        groups = [each for each in self._library.groups.values() if each.has_aggregation]
        in_groups = {task.task_name for group in groups for task in group.get_all_tasks()}
        totals = {
            measure: each
            for measure, each in self.totals(records).items()
            if isinstance(each, Estimate) and measure.partition(", ")[0] in self._library.groups
        }
        bars: dict[tuple[str, str], Estimate] = {}
        for measure, each in (totals | estimate_measures(self, records)).items():
            name, shots, _ = measure.split(", ", 2)
            if name not in in_groups:
                bars.setdefault((shots, name), each)
        return bars

    def _results(self, records: Records) -> Iterator[dict[str, Any]]:
        """Yield the value and the standard error of each metric of each task and group.

        If the setting ``shots`` is unset, each task has its own number of shots. If these numbers
        differ between any two tasks, the result of a group has the text ``own`` as ``shots``.
        """
        passes: dict[int | None, list[Record]] = {}
        for record in records:
            passes.setdefault(record["shots"] if self.shots else None, []).append(record)
        for of_pass in passes.values():
            by_task: dict[str, list[Mapping[str, Any]]] = {}
            shots: dict[str, int] = {}
            for record in of_pass:
                by_task.setdefault(record["task"], []).append(record["metrics"])
                shots[record["task"]] = record["shots"]
            common = {*shots.values()}
            of_group: str | int = common.pop() if len(common) == 1 else "own"
            for name, values in self._library.aggregate(by_task).items():
                for key in (each for each in values if "," in each and "_stderr," not in each):
                    metric, filter_name = key.split(",", 1)
                    yield {
                        "task": name,
                        "version": self._library.version(name),
                        "shots": shots.get(name, of_group),
                        "metric": metric,
                        "filter": filter_name,
                        "value": values[key],
                        "stderr": values.get(f"{metric}_stderr,{filter_name}"),
                    }

    @cached_property
    def _library(self) -> "Tasks":
        tasks: Tasks = _harness().Tasks(self.tasks, self.include_path, self.data_dir)
        return tasks

    def _questions(self, target: Target) -> "Sequence[Question]":
        # Questions depend on the target only if its chat template is applied.
        key = target.name if self.apply_chat_template else None
        if key not in self._built:
            template = _encoder(target).apply_chat_template if self.apply_chat_template else None
            self._built[key] = [
                question
                for shots in self.shots or (None,)
                for question in self._library.questions(shots, self.samples, template)
            ]
        return self._built[key]

    @cached_property
    def _built(self) -> "dict[str | None, list[Question]]":
        return {}


def _measure(name: str, shots: str | int, key: str) -> str:
    metric, filter_name = key.split(",", 1)
    filtered = "" if filter_name == "none" else f" ({filter_name})"
    return f"{name}, {shots} shots, {metric}{filtered}"


def _accuracy(records: Records, name: str, shots: int, metric: str) -> float | None:
    values = [
        record["metrics"][f"{metric},none"]
        for record in records
        if record["task"] == name and record["shots"] == shots
    ]
    return float(np.mean(values)) if values else None


def _harness() -> ModuleType:
    try:
        from diffmegatron.evaluation import harness
    except ImportError as error:
        raise UserError(
            f"suite 'lm-eval' needs EleutherAI's lm-eval, which cannot be imported ({error}); "
            "install the extra with pip install 'diffmegatron[evaluation]'"
        ) from None
    return harness


@lru_cache(maxsize=1)
def _encoder(target: Target) -> "Encoder":
    # `check` has refused a missing lm-eval before.
    from diffmegatron.evaluation.lm_eval_encoder import Encoder

    return Encoder(target)
