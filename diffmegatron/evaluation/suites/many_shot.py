"""Many-shot classification in context with constrained decoding (Bertsch et al.; Ratner et al.)."""

from collections.abc import Mapping, Sequence

from pydantic import Field
from typing_extensions import override

from diffmegatron.evaluation.classification_datasets import ClassificationSuite, EncodedTask
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_curves
from diffmegatron.evaluation.requests import ItemGenerator
from diffmegatron.evaluation.suite import Item, Mean, Record, Records
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count

_MEAN = ", mean over shots"


class ManyShot(ClassificationSuite):
    """Accuracy of classification after ``shots`` examples of the shuffled training set."""

    name = "many-shot"
    direction = "higher"
    title = "Many-shot classification, accuracy"
    description = (
        "The model classifies texts after examples with their labels. The rows are the accuracy "
        "by task and by number of examples in total, and its mean over these numbers."
    )

    shots: tuple[Count, ...] = Field(default=(1, 10, 50, 100, 200, 400, 800), min_length=1)
    samples: Count = Field(default=250, description="test items of a task")

    @override
    def items(self, target: Target) -> list[Item]:
        found: list[Item] = []
        for name in self.tasks:
            task = EncodedTask(name, self.data_dir, self.samples, target, max(self.shots))
            for shots in self.shots:
                found += task.items(task.train[:shots], f"{name}/{shots}", name, shots)
        return found

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        name, shots, prompt, question, label = item.content
        (tokens,) = yield [prompt.request(question)]
        given = prompt.label(tokens)
        asked = int(item.key.rpartition("/")[2])
        numbers = {"question": asked, "shots": shots, "tokens": len(prompt.prefix)}
        return {"task": name, **numbers, "label": label, "given": given, "right": given == label}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        right = Mean(float(record["right"]))
        task, shots = record["task"], record["shots"]
        return {f"{task}, {shots} shots": right, f"{task}{_MEAN}": right}

    @override
    def ordered(self, measures: Sequence[str]) -> list[str]:
        tasks = list(self.tasks)
        return sorted(
            measures, key=lambda name: (tasks.index(name.split(", ")[0]), name.endswith(_MEAN))
        )

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
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
