"""Multiple choice as EleutherAI's lm-eval asks and counts it, on local data.

Needs lm-eval (the extra ``evaluation``).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from pydantic import Field

from diffmegatron.errors import UserError
from diffmegatron.evaluation.figures import estimate_measures, plot_bars
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.multiple_choice import QUESTIONS
from diffmegatron.evaluation.suite import Item, Mean, Published, Record, Records, Suite
from diffmegatron.evaluation.suites.many_shot import DATA_DIR
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from diffmegatron.evaluation.harness import Question, Task

_TABLE = "3B, 1T tokens, accuracy of a kind that the paper does not name"
# Of HellaSwag models of that size reach it only by the length of the choices.
_PAPER = {
    "arc_challenge": ("acc", 0.378),
    "arc_easy": ("acc", 0.729),
    "boolq": ("acc", 0.69),
    "hellaswag": ("acc_norm", 0.714),
    "openbookqa": ("acc", 0.29),
    "piqa": ("acc", 0.768),
    "winogrande": ("acc", 0.671),
}
_NO_PASSAGE = "boolq without passages"


class _Asked(NamedTuple):
    task: "Task"
    questions: "list[Question]"


class MultipleChoice(Suite):
    """Tasks of lm-eval with its prompts, its draws of examples, and its metrics.

    As in lm-eval a prompt that is longer than the context loses its beginning.
    """

    name: ClassVar[str] = "lm-eval"
    title: ClassVar[str] = "LM Eval Harness, accuracy"
    description: ClassVar[str] = (
        "Each item is a question with choices. The model takes the choice with the highest "
        "likelihood: acc by the likelihood itself, acc_norm by the likelihood per byte."
    )
    published: ClassVar[tuple[Published, ...]] = (
        *(
            Published(f"{task}, 0 shots, {metric}", value, None, _TABLE)
            for task, (metric, value) in _PAPER.items()
        ),
        Published("average, 0 shots", 0.562, 0.554, "3B, 350B tokens"),
        Published("average, 5 shots", 0.58, 0.564, "3B, 350B tokens"),
    )

    data_dir: Path = DATA_DIR
    tasks: tuple[str, ...] = Field(default=tuple(QUESTIONS), min_length=1)
    shots: tuple[Annotated[int, Field(ge=0)], ...] = Field(default=(0, 5), min_length=1)
    samples: Count | None = Field(default=None, description="the first of a task; all without")

    def check(self, target: Target) -> None:
        """The library, the data and the tokenizer are there."""
        _harness()
        if len({*self.tasks}) < len(self.tasks) or len({*self.shots}) < len(self.shots):
            raise UserError(
                f"lm-eval.tasks {list(self.tasks)} or lm-eval.shots {list(self.shots)} name one "
                "twice; give each once"
            )
        for name in self.tasks:
            if name not in QUESTIONS:
                raise UserError(f"task {name!r} is unknown; give some of {', '.join(QUESTIONS)}")
            for shots in self.shots:
                self._asked(name, shots)
        _tokenizer(target)

    def items(self, target: Target) -> list[Item]:
        """Return the questions of each task after each number of examples.

        The beginning of a prompt can be cut off but a choice cannot: an item needs a context that
        holds its longest choice.
        """
        tokenizer = _tokenizer(target)

        def longest(requests: Sequence[tuple[str, str]]) -> int:
            return _harness().longest_choice(requests, tokenizer, target.context)

        return [
            Item(
                f"{name}/{shots}/{number}",
                longest(question.requests),
                (name, shots, number, question.requests),
            )
            for name in self.tasks
            for shots in self.shots
            for number, question in enumerate(self._asked(name, shots).questions)
        ]

    def score(self, model: Model, item: Item) -> Record:
        """Log-likelihoods of the choices, and the metrics that lm-eval makes of them."""
        name, shots, number, requests = item.content
        network = _harness().Network(model, _tokenizer(model.target))
        found = network.likelihoods(requests)
        asked = self._asked(name, shots)
        return {
            "task": self._called(name),
            "shots": shots,
            "likelihoods": [likelihood for likelihood, _ in found],
            "metrics": asked.task.metrics(asked.questions[number].row, found),
            "cut": network.cut,
        }

    def means(self, record: Record) -> dict[str, Mean]:
        """By task, shots and metric."""
        return {
            f"{record['task']}, {record['shots']} shots, {metric}": Mean(value)
            for metric, value in record["metrics"].items()
        }

    def totals(self, records: Records) -> dict[str, float]:
        """The average of all seven tasks, where they were asked."""
        found: dict[str, float] = {}
        for shots in self.shots:
            each = [_accuracy(records, name, shots, _PAPER[name][0]) for name in _PAPER]
            values = [value for value in each if value is not None]
            if len(values) == len(_PAPER):
                found[f"average, {shots} shots"] = float(np.mean(values))
        return found

    def remarks(self, records: Mapping[str, Records]) -> list[str]:
        """Prompts that were cut, and questions that are not what the task asks."""
        found = []
        for target, of_target in records.items():
            if cut := sum(bool(record["cut"]) for record in of_target):
                found.append(
                    f"{target}: {cut} of {len(of_target)} items were longer than its context and "
                    "lost the beginning of the prompt, as in lm-eval"
                )
        if any(record["task"] == _NO_PASSAGE for each in records.values() for record in each):
            found.append("boolq: its file has no passages, so that the questions stand alone")
        return found

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return "higher"

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw bars by task, a panel for every number of shots."""
        names = [self._called(name) for name in self.tasks]
        figure.set_size_inches(7.5, 3.4 * len(self.shots))
        estimates = {name: estimate_measures(self, each) for name, each in records.items()}
        panels = figure.subplots(len(self.shots), 1, squeeze=False)[:, 0]
        for axes, shots in zip(panels, self.shots, strict=True):
            bars = {
                target: [own.get(f"{name}, {shots} shots, acc") for name in names]
                for target, own in estimates.items()
            }
            plot_bars(axes, [name.replace(" ", "\n") for name in names], bars, "accuracy (acc)")
            axes.set(title=f"{shots} shots", ylim=(0, 1))
        return True

    def _asked(self, name: str, shots: int) -> _Asked:
        return _opened(name, self.data_dir, shots, self.samples)

    def _called(self, name: str) -> str:
        """The task's name, or what is asked in its place."""
        whole = QUESTIONS[name].is_repository(self.data_dir, QUESTIONS[name].split)
        return name if name != "boolq" or whole else _NO_PASSAGE


def _accuracy(records: Records, name: str, shots: int, metric: str) -> float | None:
    values = [
        record["metrics"][metric]
        for record in records
        if record["task"] == name and record["shots"] == shots
    ]
    return float(np.mean(values)) if values else None


def _harness() -> ModuleType:
    try:
        from diffmegatron.evaluation import harness
    except ImportError as error:
        raise UserError(
            f"suite 'lm-eval' asks by EleutherAI's lm-eval, which does not load here ({error}); "
            "install the extra with pip install 'diffmegatron[evaluation]'"
        ) from None
    return harness


@lru_cache(maxsize=2 * len(QUESTIONS))
def _opened(name: str, data_dir: Path, shots: int, samples: int | None) -> _Asked:
    """A task and its questions, made once for all items and targets."""
    rows = QUESTIONS[name].read(data_dir, name)
    examples = QUESTIONS[name].read(data_dir, name, train=True) if shots else []
    if len(examples) <= shots and shots:
        raise UserError(
            f"{shots} shots of {name} are drawn from more than {shots} examples, and the training "
            f"files have {len(examples)}; give fewer shots"
        )
    task = _harness().Task(name, rows, examples, shots)
    return _Asked(task, task.questions(samples or len(rows)))


@lru_cache(maxsize=1)
def _tokenizer(target: Target) -> Any:
    return _harness().load_tokenizer(target)
