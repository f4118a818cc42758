"""The base class of suites (benchmarks), and the types of their items and results.

A suite is a class in a file of ``suites/``; its fields are settings.
A target is a model to evaluate.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.requests import Answer, ItemGenerator, Request
from diffmegatron.section import Section, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from diffmegatron.evaluation.model import Model
    from diffmegatron.evaluation.targets import Target

# The recorded result of an item, in types of JSON.
Record = dict[str, Any]
Records = Sequence[Record]
Direction = Literal["higher", "lower"]
# Maximum number of items whose requests are in memory at the same time.
_OPEN_ITEMS = 1024
Window = Annotated[Size, Field(ge=2)]
"""Number of tokens of a window of text, including the first token, which is not scored."""


class Item(NamedTuple):
    """A part of a suite that is scored and recorded by itself, such as a question or a document.

    Attributes:
        key: name within the suite; the same for every target.
        tokens: context length that the item needs; 0 if any context suffices.
        content: all values on which the requests depend. Its ``repr`` must show all of them,
            because a restart compares a hash of it.
    """

    key: str
    tokens: int
    content: Any


class Mean(NamedTuple):
    """An item's contribution to a measure, such as an accuracy.

    The measure is the sum of ``total`` divided by the sum of ``weight`` over all items.

    Attributes:
        total: e.g. a negative log-likelihood, or 1 for a correct answer.
        weight: e.g. the number of tokens.
        per_token: whether the measure can be compared only between models with the same tokenizer.
    """

    total: float
    weight: float = 1.0
    per_token: bool = False


class Estimate(NamedTuple):
    """A value and its 95% interval from ``low`` to ``high``, both None if there is no interval.

    ``units`` is the number of items, or None without a bootstrap. Items that the bootstrap draws
    together (:meth:`Suite.unit`) count as one.
    """

    value: float
    low: float | None
    high: float | None
    units: int | None


class Published(NamedTuple):
    """Values of a measure in a paper, which the report prints beside the targets' values.

    ``transformer`` is None if the paper has only the differential value. ``source`` describes the
    paper's models and the place in the paper, e.g. ``3B, table 2``.
    """

    measure: str
    differential: float
    transformer: float | None
    source: str


class Suite(Section, ABC):
    """Base of all suites.

    The command-line options ``data``, ``haystack`` and ``data_dir`` set the fields of these names.
    If the command line does not set a field ``context``, ``make_suites`` in ``suites/__init__.py``
    sets it to the shortest context of the targets, at most 2,048 tokens. Arguments ``records`` of
    type ``Mapping`` map a target's name to the records of its items.

    Attributes:
        passes: names of the passes over :meth:`items` and :meth:`follow_ups` in progress lines.
        reads_attention: whether the suite needs attention logits or maps.
        needs_network: whether the suite needs the network itself, not only answers to requests.
            Suites that read attention do too.
        reads_runs: whether the suite reads only training records of runs and uses no network.
        is_parallel: whether several processes may score items at the same time.
        within_training: whether the suite can run during training, where logits and activations
            are not available.
        direction: whether higher or lower values of every measure are better; None otherwise.
        follow_up_settings: names of fields that affect only the follow-ups. A restart with other
            values scores the follow-ups whose keys have no record.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    passes: ClassVar[tuple[str, str]] = ("", "")
    published: ClassVar[tuple[Published, ...]] = ()
    reads_attention: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False
    reads_runs: ClassVar[bool] = False
    is_parallel: ClassVar[bool] = True
    within_training: ClassVar[bool] = False
    direction: ClassVar[Direction | None] = None
    follow_up_settings: ClassVar[frozenset[str]] = frozenset()

    @property
    def needs_one_tokenizer(self) -> bool:
        """True if all targets must have the same tokenizer."""
        return False

    def check(self, target: "Target") -> None:
        """Raise an error if the suite does not support a target; called before any scoring."""
        if self.reads_attention:
            # The property raises an error if the kind of attention is unknown.
            _ = target.attention

    @abstractmethod
    def items(self, target: "Target") -> Sequence[Item]:
        """Return the items for a target, always in the same order."""

    def rounds(self, items: Sequence[Item]) -> Sequence[Sequence[Item]]:
        """Return groups of items that all targets must score before the next group begins.

        Items in no group are scored target by target.
        """
        return ()

    def follow_ups(self, target: "Target", records: Records) -> Sequence[Item]:
        """Return further items to score, which may depend on the records of all items."""
        return ()

    def requests_of(self, target: "Target", item: Item) -> ItemGenerator:
        """Yield lists of requests to the model, receive the answers, and return the item's record.

        A suite that uses the network directly, or not at all, overrides :meth:`score` instead.
        """
        raise NotImplementedError(f"suite {self.name!r} defines neither requests_of nor score")

    def score(self, model: "Model", item: Item) -> Record:
        """Return an item's record, or raise a NotFiniteError.

        The record must not depend on other items.
        """
        ((_, record),) = _score_items(model, [(item.key, self.requests_of(model.target, item))])
        if isinstance(record, NotFiniteError):
            raise record
        return record

    def scores(
        self, model: "Model", items: Sequence[Item]
    ) -> Iterator[tuple[str, Record | NotFiniteError]]:
        """Yield each item's key with its record, or with a NotFiniteError, in any order."""
        if type(self).score is Suite.score:
            generators = ((item.key, self.requests_of(model.target, item)) for item in items)
            yield from _score_items(model, generators)
            return
        for item in items:
            try:
                yield item.key, self.score(model, item)
            except NotFiniteError as error:
                yield item.key, error

    def means(self, record: Record) -> Mapping[str, Mean]:
        """Return the item's contribution to each measure, by the name of the measure."""
        return {}

    def unit(self, key: str, record: Record) -> str:
        """Return the name of an item's unit; the bootstrap draws all items of a unit together.

        Dependent items, e.g. items with the same question, must have the same unit. Otherwise,
        intervals are too narrow.
        """
        return key

    def better(self, measure: str) -> Direction | None:
        """Return whether higher or lower values of a measure are better; None if neither."""
        return self.direction

    def ordered(self, measures: Sequence[str]) -> list[str]:
        """Sort the names of measures for the report; by default, keep their order."""
        return list(measures)

    def totals(self, records: Records) -> Mapping[str, float | Estimate]:
        """Return numbers of one target that are not means over items, by name."""
        return {}

    def across(self, records: Mapping[str, Records]) -> Mapping[str, float]:
        """Return numbers that depend on the records of several targets, by name."""
        return {}

    def details(self, records: Mapping[str, Records]) -> Mapping[str, Any]:
        """Return further values for ``results.json``, which the report does not show."""
        return {}

    def remarks(self, records: Mapping[str, Records]) -> Sequence[str]:
        """Return sentences for the report, such as the reason why a result is missing."""
        return ()

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw the targets' records into an empty figure, and return whether anything was drawn."""
        return False


class _OpenItem:
    """An item whose requests are being answered; until it is complete, ``record`` is None."""

    def __init__(self, key: str, generator: ItemGenerator) -> None:
        self.key, self._generator = key, generator
        self.record: Record | NotFiniteError | None = None
        self._advance(None)

    def receive(self, number: int, answer: Answer) -> Record | NotFiniteError | None:
        """Store the answer to request ``number``; return the record if the item is now complete."""
        if self.record is not None:
            return None
        self._answers[number] = answer
        if isinstance(answer, NotFiniteError):
            self.record = answer
        elif len(self._answers) == len(self.requests):
            self._advance([self._answers[place] for place in range(len(self.requests))])
        return self.record

    def _advance(self, answers: list[Any] | None) -> None:
        self._answers: dict[int, Answer] = {}
        self.requests: list[Request] = []
        try:
            while not self.requests:
                self.requests = list(self._generator.send(answers))  # type: ignore[arg-type]
                answers = []
        except StopIteration as end:
            self.record = end.value


def _score_items(
    model: "Model", generators: Iterable[tuple[str, ItemGenerator]]
) -> Iterator[tuple[str, Record | NotFiniteError]]:
    """Yield the key and the record or error of each item, in the order of completion."""
    left = iter(generators)
    while window := list(islice(left, _OPEN_ITEMS)):
        items = []
        for key, generator in window:
            item = _OpenItem(key, generator)
            # An item that sends no request to `model` is complete here, e.g. if the item called
            # an external model. Yield its record before the next generator may raise an error.
            if item.record is not None:
                yield key, item.record
            items.append(item)
        while items := [item for item in items if item.record is None]:
            places = [(item, number) for item in items for number in range(len(item.requests))]
            requests = [item.requests[number] for item, number in places]
            for place, answer in model.answers(requests):
                item, number = places[place]
                if (record := item.receive(number, answer)) is not None:
                    yield item.key, record
