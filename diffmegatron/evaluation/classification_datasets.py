"""Classification in context: data sets, prompts, and decoding that can only give a label.

Constrained decoding as Ratner et al. (2023): at every step the model may choose among the tokens
that continue a label which still matches.
"""

import csv
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from diffmegatron.errors import UserError
from diffmegatron.evaluation.requests import Generation, LabelTree
from diffmegatron.evaluation.suite import Item
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import parse_json, read_bytes, shown

# Between the examples of a prompt.
SEPARATOR = "\n\n"


class Example(NamedTuple):
    """A text and its label."""

    text: str
    label: str


@dataclass(frozen=True)
class Task:
    """A data set in files of its published format.

    Attributes:
        train, test: names of the files under ``--data-dir``.
        read: the examples of a file's content, of the training or the test set.
        text, label: what stands before either in a prompt.
        origin: where the files come from, for whoever has none.
    """

    train: str
    test: str
    read: Callable[[bytes, str], Iterator[Example]]
    text: str
    label: str
    origin: str

    def examples(self, data_dir: Path, split: str) -> list[Example]:
        """Those of a split, ``train`` or ``test``.

        Raises:
            UserError: the file is missing or of another format.
        """
        path = data_dir / (self.train if split == "train" else self.test)
        if not path.exists():
            raise UserError(f"{shown(path)} does not exist; it is {self.origin}")
        content = read_bytes(path)
        try:
            found = list(self.read(content, split))
        except (ValueError, KeyError, AttributeError, csv.Error):
            found = []
        if not found:
            raise UserError(f"{shown(path)} has no examples of the form of {self.origin}")
        return found

    def question(self, text: str) -> str:
        """A prompt's end, after which the label is to come."""
        return f"{self.text}: {text}\n{self.label}:"

    def demonstration(self, example: Example) -> str:
        """An example as it stands in a prompt."""
        return f"{self.question(example.text)} {example.label}{SEPARATOR}"


def _trec(content: bytes, split: str, *, fine: bool = False) -> Iterator[Example]:
    for line in content.decode("latin-1").splitlines():
        kind, text = line.split(" ", 1)
        coarse, detail = kind.split(":")
        label = _TREC[coarse]
        yield Example(text.strip(), f"{label} {detail}" if fine else label)


def _trec_fine(content: bytes, split: str) -> Iterator[Example]:
    return _trec(content, split, fine=True)


def _banking(content: bytes, split: str) -> Iterator[Example]:
    for row in csv.DictReader(StringIO(content.decode())):
        yield Example(row["text"].strip(), row["category"].replace("_", " "))


def _clinic(content: bytes, split: str) -> Iterator[Example]:
    for text, intent in parse_json(content, dict[str, list[tuple[str, str]]], "clinc150")[split]:
        yield Example(text, intent.replace("_", " "))


_TREC = {
    "ABBR": "abbreviation",
    "DESC": "description",
    "ENTY": "entity",
    "HUM": "human",
    "LOC": "location",
    "NUM": "number",
}
_TREC_FILES = "the TREC question types in lines of 'COARSE:fine question' (Li and Roth, 2002)"
TASKS: dict[str, Task] = {
    "trec": Task("trec_train.txt", "trec_test.txt", _trec, "Question", "Type", _TREC_FILES),
    "trec-fine": Task(
        "trec_train.txt", "trec_test.txt", _trec_fine, "Question", "Type", _TREC_FILES
    ),
    "banking77": Task(
        "banking77_train.csv",
        "banking77_test.csv",
        _banking,
        "query",
        "intent",
        "Banking-77 with columns text and category (Casanueva et al., 2020)",
    ),
    "clinic150": Task(
        "clinc150.json",
        "clinc150.json",
        _clinic,
        "utterance",
        "intent",
        "data_full.json of CLINC-150, lists of [text, intent] by split (Larson et al., 2019)",
    ),
}


def check_tasks(names: Sequence[str], data_dir: Path) -> None:
    """See to it that all data are there.

    Raises:
        UserError: a task is unknown, or its files are missing or of another format.
    """
    for name in names:
        if name not in TASKS:
            raise UserError(f"task {name!r} is unknown; give some of {', '.join(TASKS)}")
        for split in ("train", "test"):
            TASKS[name].examples(data_dir, split)


@dataclass(frozen=True)
class Prompt:
    """What questions share that come after the same examples.

    Attributes:
        digest: of the rest, which ``repr`` leaves out: many items have it.
        prefix: the start token and the examples.
        labels: that may be given.
    """

    digest: str
    prefix: list[int] = field(repr=False)
    labels: LabelTree = field(repr=False)

    def request(self, question: Sequence[int]) -> Generation:
        """Return the request for the most likely label after a question."""
        ids = [*self.prefix, *question]
        return Generation(ids, self.labels.depth, shared=len(self.prefix), labels=self.labels)

    def label(self, tokens: Sequence[int]) -> str:
        """Return the label of an answer."""
        node = self.labels
        for token in tokens:
            node = node[token]
        assert node.label is not None
        return node.label


class Questions:
    """The questions of a task, in a target's tokens.

    Args:
        name: of the task.
        data_dir: where its files are.
        count: of test items, drawn with a fixed seed; all, where there are fewer.
        target: whose tokens.

    Attributes:
        train: the examples of the training set, shuffled.

    Raises:
        UserError: the data are missing or of another format, or labels cannot be told apart.
    """

    def __init__(self, name: str, data_dir: Path, count: int, target: Target) -> None:
        self._task, self._target = TASKS[name], target
        self.train = self._task.examples(data_dir, "train")
        random.Random(f"{name}/train").shuffle(self.train)
        self._names = sorted({example.label for example in self.train})
        self._labels = label_tree(self._names, target)
        test = self._task.examples(data_dir, "test")
        chosen = random.Random(f"{name}/test").sample(test, min(count, len(test)))
        self._asked = [(target.encode(self._task.question(x)), label) for x, label in chosen]

    def after(self, examples: Sequence[Example], key: str, *more: Any) -> list[Item]:
        """Every question after the same examples.

        Args:
            examples: in order.
            key: of the items, before the number of the question.
            more: comes first in their content; then the prompt, the question and its label.
        """
        text = "".join(map(self._task.demonstration, examples))
        digest = hashlib.sha256(repr((text, self._names)).encode()).hexdigest()
        prefix = [self._target.start, *self._target.encode(text)]
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
    """Every label's tokens after ``Type:``, from the root on.

    A label whose tokens begin another's ends with the separator, as it does in prompts.

    Raises:
        UserError: a label has no tokens, or those of another.
    """
    ids = {label: tuple(target.encode(f" {label}")) for label in labels}
    if len(set(ids.values())) < len(ids) or not all(ids.values()):
        raise UserError(
            f"the tokenizer of {target.name} does not tell the labels apart: two have the same "
            "tokens, or one has none"
        )
    ending, root = tuple(target.encode(SEPARATOR)), LabelTree()
    for label, own in ids.items():
        begins = any(other[: len(own)] == own for other in ids.values() if other != own)
        node = root
        for token in (*own, *ending) if begins else own:
            node = node.setdefault(token, LabelTree())
        node.label = label
    return root
