"""Text classification in context: data sets, prompts, and decoding constrained to the labels.

At every step the model chooses among the next tokens of labels (Ratner et al., 2023).
"""

import csv
import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.evaluation.datasets import DATA_DIR, DataSet, Reader, choose
from diffmegatron.evaluation.requests import Generation, LabelTree
from diffmegatron.evaluation.suite import Item, Record, Suite
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path, read_bytes, read_json, read_text, shorten
from diffmegatron.validation import validated

SEPARATOR = "\n\n"


class Example(NamedTuple):
    """A text and its label."""

    text: str
    label: str


@dataclass(frozen=True)
class ClassificationTask:
    """A classification data set, and the words before a text and its label, e.g. ``Question``."""

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


def _trec(*, is_fine: bool) -> Reader[Example]:
    def read(path: Path) -> Iterator[Example]:
        for number, line in enumerate(read_bytes(path).decode("latin-1").splitlines(), start=1):
            match = _TREC_LINE.fullmatch(line)
            if match is None or match[1] not in _TREC:
                raise UserError(
                    f"{format_path(path)} at line {number} is {shorten(repr(line))}; it must be "
                    f"'COARSE:fine question' with a class of {', '.join(_TREC)}"
                )
            label = _TREC[match[1]]
            yield Example(match[3].strip(), f"{label} {match[2]}" if is_fine else label)

    return read


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


def _clinic(split: str) -> Reader[Example]:
    def read(path: Path) -> Iterator[Example]:
        splits = read_json(path, dict[str, list[tuple[str, str]]])
        if split not in splits:
            raise UserError(f"{format_path(path)} has no split {split!r}")
        return (Example(text, intent.replace("_", " ")) for text, intent in splits[split])

    return read


def _trec_task(*, is_fine: bool) -> ClassificationTask:
    origin = "the TREC question types in lines of 'COARSE:fine question' (Li and Roth, 2002)"
    train, test = (
        DataSet(f"trec_{split}.txt", _trec(is_fine=is_fine), origin) for split in ("train", "test")
    )
    return ClassificationTask(train, test, "Question", "Type")


def _banking_split(split: str) -> DataSet[Example]:
    origin = "Banking-77 with columns text and category (Casanueva et al., 2020)"
    return DataSet(f"banking77_{split}.csv", _banking, origin)


def _clinic_split(split: str) -> DataSet[Example]:
    origin = "data_full.json of CLINC-150, lists of [text, intent] by split (Larson et al., 2019)"
    return DataSet("clinc150.json", _clinic(split), origin)


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
    """Base class of suites that classify the test texts of tasks after examples."""

    data_dir: Path = DATA_DIR
    tasks: tuple[str, ...] = Field(default=tuple(TASKS), min_length=1)

    @override
    def check(self, target: Target) -> None:
        for task in choose(self.tasks, TASKS, "task"):
            task.train.examples(self.data_dir)
            task.test.examples(self.data_dir)

    @override
    def unit(self, key: str, record: Record) -> str:
        """Return the test question, whose items with other examples are not independent."""
        return f"{record['task']}/{record['question']}"


@dataclass(frozen=True)
class Prompt:
    """The part of a prompt that many questions share: examples, and labels to choose from.

    The ``repr`` of a prompt is computed for every question. It has only ``digest``, the hash of
    examples and labels. ``prefix`` has the ids of the start token and the examples.
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

    ``train`` has the shuffled training set, at least ``shots`` examples. At most ``count`` test
    examples are drawn. Both use fixed seeds.
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
        """Return an item for every test question, with the same examples before each.

        The content of an item is (``*more``, prompt, ids of the question, correct label).
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

    If the tokens of a label are the beginning of another label's tokens, the separator of examples
    is appended to them. The model can then choose either label.
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
