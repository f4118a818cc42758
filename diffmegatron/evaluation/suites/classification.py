"""Text classification after examples in the prompt, with answers constrained to the labels.

``many-shot`` varies the number of examples (Bertsch et al.; Ratner et al.). ``order`` varies their
order (Differential Transformer, Ye et al., section 3.5).
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

import numpy as np
from pydantic import Field
from typing_extensions import override

from diffmegatron.evaluation.bootstrap import estimate_of_means
from diffmegatron.evaluation.classification_datasets import (
    ClassificationSuite,
    EncodedTask,
    Example,
)
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_curves
from diffmegatron.evaluation.requests import ItemGenerator
from diffmegatron.evaluation.suite import Direction, Estimate, Item, Mean, Record, Records
from diffmegatron.evaluation.targets import Target
from diffmegatron.section import Count

_MEAN = ", mean over shots"
_ARRANGEMENTS = ("random", "alternating")
_STATISTICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "best": lambda means: means.max(-1),
    "worst": lambda means: means.min(-1),
    "margin": lambda means: np.ptp(means, axis=-1),
}


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


class Order(ClassificationSuite):
    """Accuracy of classification after the same examples in different orders.

    The arrangement ``random`` shuffles all examples. ``alternating`` shuffles the examples of each
    class, and then uses one of each class in turn.
    """

    name = "order"
    title = "Order of examples, accuracy"
    description = (
        "The model classifies texts after the same examples in several orders: at random, or "
        "with alternating labels. Rows without best or worst are means over the orders. The "
        "margin is the accuracy of the best order less that of the worst; it is small for a "
        "model that is robust, and grows by chance if there are few items."
    )

    tasks: tuple[str, ...] = Field(default=("trec",), min_length=1)
    shots: Count = 60
    permutations: Count = 10
    samples: Count = Field(default=100, description="test items of a task")

    @override
    def items(self, target: Target) -> list[Item]:
        found: list[Item] = []
        for name in self.tasks:
            task = EncodedTask(name, self.data_dir, self.samples, target, self.shots)
            chosen = list(_in_turn(task.train))[: self.shots]
            for arrangement in _ARRANGEMENTS:
                for permutation in range(self.permutations):
                    where = (name, arrangement, permutation)
                    examples = arranged(chosen, arrangement, permutation)
                    found += task.items(examples, "/".join(map(str, where)), *where)
        return found

    @override
    def requests_of(self, target: Target, item: Item) -> ItemGenerator:
        name, arrangement, permutation, prompt, question, label = item.content
        (tokens,) = yield [prompt.request(question)]
        given = prompt.label(tokens)
        where = {"task": name, "arrangement": arrangement, "permutation": permutation}
        where["question"] = int(item.key.rpartition("/")[2])
        return {**where, "label": label, "given": given, "right": given == label}

    @override
    def means(self, record: Record) -> dict[str, Mean]:
        return {f"{record['task']}, {record['arrangement']}": Mean(float(record["right"]))}

    @override
    def totals(self, records: Records) -> dict[str, Estimate]:
        """Return best accuracy, worst accuracy and margin of each task and arrangement.

        Each bootstrap resample draws questions, and has its own best and worst permutation.
        """
        return {
            f"{name}, {key}": estimate_of_means(right, statistic)
            for name, right in _right_by_permutation(records).items()
            for key, statistic in _STATISTICS.items()
        }

    @override
    def better(self, measure: str) -> Direction:
        return "lower" if measure.endswith("margin") else "higher"

    @override
    def draw(self, figure: Figure, records: Mapping[str, Records]) -> bool:
        from matplotlib.ticker import MaxNLocator

        names = [f"{task}, {each}" for task in self.tasks for each in _ARRANGEMENTS]
        right = {target: _right_by_permutation(each) for target, each in records.items()}
        panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
        for axes, name in zip(panels, names, strict=True):
            points = {}
            for target, by_name in right.items():
                if name in by_name:
                    accuracies = [
                        estimate_of_means(column[:, None], lambda means: means[..., 0])
                        for column in by_name[name].T
                    ]
                    accuracies.sort(key=lambda each: each.value)
                    points[target] = list(enumerate(accuracies, start=1))
            plot_curves(axes, points, "permutation, from the worst", "accuracy")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set(title=name, ylim=(0, 1))
        return True


def arranged(examples: Sequence[Example], arrangement: str, permutation: int) -> list[Example]:
    """Return the examples in an arrangement; ``permutation`` seeds the shuffle."""
    shuffled = list(examples)
    random.Random(f"{arrangement}/{permutation}").shuffle(shuffled)
    return list(_in_turn(shuffled)) if arrangement == "alternating" else shuffled


def _in_turn(examples: Sequence[Example]) -> Iterator[Example]:
    """Yield one example of each class in turn, until all are used."""
    by_class: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        by_class[example.label].append(example)
    for turn in zip_longest(*by_class.values()):
        yield from (example for example in turn if example is not None)


def _right_by_permutation(records: Records) -> dict[str, np.ndarray]:
    """Return ``TASK, ARRANGEMENT`` -> whether answers are right, 0 or 1, [questions, permutations].

    A question counts only if every permutation has an answer: some prompts may exceed the context.
    """
    right: dict[str, dict[int, dict[int, bool]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        name = f"{record['task']}, {record['arrangement']}"
        right[name][record["permutation"]][record["question"]] = record["right"]
    found = {}
    for name, by_permutation in right.items():
        questions = sorted(set.intersection(*map(set, by_permutation.values())))
        if questions:
            rows = [[each[question] for each in by_permutation.values()] for question in questions]
            found[name] = np.array(rows, dtype=np.float64)
    return found
