"""Many-shot classification in context with constrained decoding (Bertsch et al.; Ratner et al.)."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from diffmegatron.evaluation.classification_datasets import TASKS, Questions, check_tasks
from diffmegatron.evaluation.figures import estimate_measures, plot_curves
from diffmegatron.evaluation.requests import Asking
from diffmegatron.evaluation.suite import Item, Mean, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DATA_DIR = Field(description="the folder of the data sets' files")


class ManyShot(Suite):
    """Accuracy after ``shots`` examples of the training set, the same for every test item.

    A larger number of shots has the smaller one's examples and more. The labels are all of the
    training set's. A prompt that is longer than a target's context is not run.
    """

    name: ClassVar[str] = "many-shot"
    title: ClassVar[str] = "Many-shot classification, accuracy"
    description: ClassVar[str] = (
        "The model classifies texts after examples with their labels. Accuracy by task and "
        "number of examples."
    )

    data_dir: Path = DATA_DIR
    tasks: tuple[str, ...] = Field(default=tuple(TASKS), min_length=1)
    shots: tuple[Count, ...] = Field(default=(1, 10, 50, 100, 200, 400, 800), min_length=1)
    samples: Count = Field(default=250, description="test items of a task")

    def check(self, target: Target) -> None:
        """The data are there."""
        check_tasks(self.tasks, self.data_dir)

    def items(self, target: Target) -> list[Item]:
        """A test item after a number of shots."""
        found: list[Item] = []
        for name in self.tasks:
            questions = Questions(name, self.data_dir, self.samples, target)
            for shots in self.shots:
                examples = questions.train[:shots]
                found += questions.after(examples, f"{name}/{shots}", name, shots)
        return found

    def ask(self, target: Target, item: Item) -> Asking:
        """Return the label given, and whether it is the right one."""
        name, shots, prompt, question, label = item.content
        (tokens,) = yield [prompt.request(question)]
        given = prompt.label(tokens)
        asked = int(item.key.rpartition("/")[2])
        numbers = {"question": asked, "shots": shots, "tokens": len(prompt.prefix)}
        return {"task": name, **numbers, "label": label, "given": given, "right": given == label}

    def means(self, record: Record) -> dict[str, Mean]:
        """By task and shots, and by task."""
        right = Mean(float(record["right"]))
        return {f"{record['task']}, {record['shots']} shots": right, record["task"]: right}

    def unit(self, key: str, record: Record) -> str:
        """Return the question, which is asked once for each number of shots."""
        return f"{record['task']}/{record['question']}"

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values are better."""
        return "higher"

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw accuracy as prompts grow, a panel for each task."""
        figure.set_size_inches(3.6 * len(self.tasks), 3.8)
        panels = figure.subplots(1, len(self.tasks), squeeze=False)[0]
        estimates = {name: estimate_measures(self, each) for name, each in records.items()}
        for axes, task in zip(panels, self.tasks, strict=True):
            lengths = {
                name: {each["shots"]: each["tokens"] for each in of_target if each["task"] == task}
                for name, of_target in records.items()
            }
            points = {
                name: [
                    (tokens, estimates[name][f"{task}, {shots} shots"])
                    for shots, tokens in sorted(of_target.items())
                ]
                for name, of_target in lengths.items()
            }
            plot_curves(axes, points, "tokens of examples", "accuracy")
            axes.set(title=task, xscale="log", ylim=(0, 1))
        return True
