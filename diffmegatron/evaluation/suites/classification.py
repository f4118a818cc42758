"""Text classification after examples in the prompt, with answers constrained to the labels.

At every decoding step the model chooses among the tokens that continue a label (Ratner et al.,
2023). The suite ``many-shot`` varies the number of examples (Bertsch et al.). The suite ``order``
varies their order (Differential Transformer, Ye et al., section 3.5).
"""

import csv
import hashlib
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.bootstrap import estimate_of_means
from diffmegatron.evaluation.datasets import DATA_DIR, DataSet, choose
from diffmegatron.evaluation.figures import Figure, estimate_measures, plot_curves
from diffmegatron.evaluation.requests import Generation, ItemGenerator, LabelTree
from diffmegatron.evaluation.suite import Direction, Estimate, Item, Mean, Record, Records, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path, read_bytes, read_json, read_text, shorten
from diffmegatron.section import Count
from diffmegatron.validation import validated

SEPARATOR = "\n\n"
_MEAN = ", mean over shots"
_ARRANGEMENTS = ("random", "alternating")
_STATISTICS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "best": lambda means: means.max(-1),
    "worst": lambda means: means.min(-1),
    "margin": lambda means: np.ptp(means, axis=-1),
}


class Example(NamedTuple):
    """A text and its label."""

    text: str
    label: str


@dataclass(frozen=True)
class ClassificationTask:
    """A classification data set, and the form of its prompts.

    ``text`` is the word before a text, e.g. ``Question``. ``label`` is the word before its label,
    e.g. ``Type``.
    """

    train: DataSet[Example]
    test: DataSet[Example]
    text: str
    label: str

    def question(self, text: str) -> str:
        """Return the question about a text: the end of a prompt, after which the label follows."""
        return f"{self.text}: {text}\n{self.label}:"

    def demonstration(self, example: Example) -> str:
        """Return an example in the form of the prompt: a question and its label."""
        return f"{self.question(example.text)} {example.label}{SEPARATOR}"


_TREC = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}
_TREC_LINE = re.compile(r"([A-Z]+):(\S*) (.*)")


def _trec(path: Path, *, is_fine: bool) -> Iterator[Example]:
    for number, line in enumerate(read_bytes(path).decode("latin-1").splitlines(), start=1):
        match = _TREC_LINE.fullmatch(line)
        if match is None or match[1] not in _TREC:
            raise UserError(
                f"{format_path(path)} at line {number} is {shorten(repr(line))}; it must be "
                f"'COARSE:fine question' with a class of {', '.join(_TREC)}"
            )
        label = _TREC[match[1]]
        yield Example(match[3].strip(), f"{label} {match[2]}" if is_fine else label)


class _Banking(BaseModel):
    text: str
    category: str


def _banking(path: Path) -> Iterator[Example]:
    try:
        rows = list(csv.DictReader(StringIO(read_text(path))))
    except csv.Error as error:
        raise UserError(f"{format_path(path)} is not a CSV file: {error}") from None
    for number, row in enumerate(rows, start=1):
        found = validated(_Banking, row, f"{format_path(path)} at row {number}")
        yield Example(found.text.strip(), found.category.replace("_", " "))


def _clinic(path: Path, *, split: str) -> Iterator[Example]:
    splits = read_json(path, dict[str, list[tuple[str, str]]])
    if split not in splits:
        raise UserError(f"{format_path(path)} has no split {split!r}")
    return (Example(text, intent.replace("_", " ")) for text, intent in splits[split])


def _trec_task(*, is_fine: bool) -> ClassificationTask:
    origin = "the TREC question types in lines of 'COARSE:fine question' (Li and Roth, 2002)"
    read = partial(_trec, is_fine=is_fine)
    train, test = (DataSet(f"trec_{split}.txt", read, origin) for split in ("train", "test"))
    return ClassificationTask(train, test, "Question", "Type")


def _banking_split(split: str) -> DataSet[Example]:
    origin = "Banking-77 with columns text and category (Casanueva et al., 2020)"
    return DataSet(f"banking77_{split}.csv", _banking, origin)


def _clinic_split(split: str) -> DataSet[Example]:
    origin = "data_full.json of CLINC-150, lists of [text, intent] by split (Larson et al., 2019)"
    return DataSet("clinc150.json", partial(_clinic, split=split), origin)


TASKS: dict[str, ClassificationTask] = {
    "trec": _trec_task(is_fine=False),
    "trec-fine": _trec_task(is_fine=True),
    "banking77": ClassificationTask(
        _banking_split("train"), _banking_split("test"), "query", "intent"
    ),
    "clinic150": ClassificationTask(
        _clinic_split("train"), _clinic_split("test"), "utterance", "intent"
    ),
}


class ClassificationSuite(Suite):
    """Base class of suites that ask for the labels of the tasks' test texts.

    A prompt has labelled examples, and then one test text.
    """

    data_dir: Path = DATA_DIR
    tasks: tuple[str, ...] = Field(default=tuple(TASKS), min_length=1, description="data sets")

    @override
    def check(self, target: Target) -> None:
        choose(self.tasks, TASKS, "task")

    @override
    def unit(self, key: str, record: Record) -> str:
        """Return the name of the test question; the bootstrap draws all its items together."""
        return f"{record['task']}/{record['question']}"


@dataclass(frozen=True)
class Prompt:
    """The part of a prompt that many questions share: examples, and labels to choose from.

    ``prefix`` has the ids of the start token and the examples. ``digest`` is the hash of the
    examples and label names. ``repr`` shows only ``digest``, because evaluation/result_file.py
    hashes the ``repr`` of items.
    """

    digest: str
    prefix: list[int] = field(repr=False)
    labels: LabelTree = field(repr=False)

    def request(self, question: Sequence[int]) -> Generation:
        """Return the request to choose a label after the token ids of a question."""
        ids = [*self.prefix, *question]
        return Generation(ids, self.labels.depth, shared=len(self.prefix), labels=self.labels)

    def label(self, tokens: Sequence[int]) -> str:
        """Return the label whose token ids are ``tokens``."""
        node = self.labels
        for token in tokens:
            node = node[token]
        assert node.label is not None
        return node.label


class EncodedTask:
    """A classification task, encoded with the tokenizer of a target (a model to evaluate).

    ``train`` is the shuffled training set, which must have at least ``shots`` examples. At most
    ``count`` test examples are drawn at random. The shuffle and the draw have fixed seeds.
    """

    def __init__(self, name: str, data_dir: Path, count: int, target: Target, shots: int) -> None:
        self._task, self._target = TASKS[name], target
        self.train = self._task.train.examples(data_dir)
        if shots > len(self.train):
            raise UserError(
                f"a prompt with {shots} shots is set, and the training set of task {name!r} has "
                f"{len(self.train)} examples; give at most {len(self.train)} shots"
            )
        random.Random(f"{name}/train").shuffle(self.train)
        self._names = sorted({example.label for example in self.train})
        self._labels = label_tree(self._names, target)
        test = self._task.test.examples(data_dir)
        chosen = random.Random(f"{name}/test").sample(test, min(count, len(test)))
        self._asked = [(target.encode(self._task.question(x)), label) for x, label in chosen]

    def items(self, examples: Sequence[Example], key: str, *more: Any) -> list[Item]:
        """Return an item for every drawn test question, with the same examples before each.

        Keys of items begin with ``key``. The content of an item is (``*more``, prompt, ids of the
        question, correct label).
        """
        text = "".join(map(self._task.demonstration, examples))
        digest = hashlib.sha256(repr((text, self._names)).encode()).hexdigest()
        prefix = [self._target.start_token, *self._target.encode(text)]
        prompt = Prompt(digest, prefix, self._labels)
        return [
            Item(
                f"{key}/{number}",
                len(prefix) + len(question) + self._labels.depth,
                (*more, prompt, question, label),
            )
            for number, (question, label) in enumerate(self._asked)
        ]


def label_tree(labels: Sequence[str], target: Target) -> LabelTree:
    """Return the tree of the token sequences of all labels, each encoded after a space.

    If the tokens of a label are the beginning of another label's tokens, ``SEPARATOR`` is appended
    to the shorter label. The model can then choose either label.
    """
    ids = {label: tuple(target.encode(f" {label}")) for label in labels}
    if len(set(ids.values())) < len(ids) or not all(ids.values()):
        raise UserError(
            f"the tokenizer of {target.name} gives two labels the same tokens, or a label none; "
            "evaluate without this task"
        )
    ending, root = tuple(target.encode(SEPARATOR)), LabelTree()
    for label, own in ids.items():
        begins = any(other[: len(own)] == own for other in ids.values() if other != own)
        node = root
        for token in (*own, *ending) if begins else own:
            node = node.setdefault(token, LabelTree())
        node.label = label
    return root


class ManyShot(ClassificationSuite):
    """Accuracy of classification after the first n examples of the shuffled training set.

    All prompts begin with the first n examples of a fixed shuffle of the training set. An empty
    line follows each example, which has this form:

        Question: What county is Modesto in ?
        Type: location

    TREC's labels are words, such as ``location`` for ``LOC``. ``trec-fine`` adds the fine class
    (``location city``). The words of the form are ``query`` and ``intent`` for Banking-77, and
    ``utterance`` and ``intent`` for CLINC. Decoding is constrained to tokens that continue a label.
    If all tokens of a label are the beginning of another label, the tokens of the empty line are
    appended to the shorter label. *Deviation*: the prompt has a fixed number of examples instead of
    a fixed number of tokens, so that models with different tokenizers read the same examples.
    """

    name = "many-shot"
    direction = "higher"
    title = "Many-shot classification, accuracy"
    description = (
        "The model classifies texts after examples with their labels. The rows are the accuracy "
        "by task and by number of examples in total, and its mean over these numbers."
    )

    shots: tuple[Count, ...] = Field(
        default=(1, 10, 50, 100, 200, 400, 800),
        min_length=1,
        description="numbers n of examples in the prompt",
    )
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

    The same examples, with balanced classes, are put into ``permutations`` orders in each of two
    arrangements. In ``random``, all examples are shuffled. In ``alternating``, the examples of each
    class are shuffled, and the classes take turns. The form of an example is that of ``many-shot``.
    For each arrangement, the report has the accuracy of the best and the worst order, and their
    difference (margin). Their resamples draw questions, and each has its own best and worst order.
    """

    name = "order"
    title = "Order of examples, accuracy"
    description = (
        "The model classifies texts after the same examples in several orders: at random, or "
        "with alternating labels. Rows without best or worst are means over the orders. The "
        "margin is the accuracy of the best order less that of the worst; it is small for a "
        "model that is robust, and grows by chance if there are few items."
    )

    tasks: tuple[str, ...] = Field(
        default=("trec",), min_length=1, description="data sets, as in many-shot"
    )
    shots: Count = Field(default=60, description="examples in the prompt")
    permutations: Count = Field(default=10, description="orders of each arrangement")
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

        The margin is the best minus the worst accuracy. Each bootstrap resample draws questions,
        and has its own best and worst permutation.
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
    """Return the examples in an arrangement (see `Order`); ``permutation`` seeds the shuffle."""
    shuffled = list(examples)
    random.Random(f"{arrangement}/{permutation}").shuffle(shuffled)
    return list(_in_turn(shuffled)) if arrangement == "alternating" else shuffled


def _in_turn(examples: Sequence[Example]) -> Iterator[Example]:
    """Yield one example of each class in turn, until all examples are used."""
    by_class: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        by_class[example.label].append(example)
    for turn in zip_longest(*by_class.values()):
        yield from (example for example in turn if example is not None)


def _right_by_permutation(records: Records) -> dict[str, np.ndarray]:
    """Return a dict: ``TASK, ARRANGEMENT`` -> float64 array [questions, permutations].

    An entry is 1 if the answer is right, and 0 otherwise. A question without a record for every
    permutation is left out.
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
