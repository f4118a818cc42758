"""What a suite of evaluation is: items, the score of an item, and what the scores say together.

A suite is one class in one file of ``suites/``, listed in ``SUITES`` there: a section of settings
whose methods say what is asked of a model. Restarting, progress, intervals, comparison and the
report are the same for all.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.asking import run_askings
from diffmegatron.evaluation.requests import Asking
from diffmegatron.section import Section, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from diffmegatron.evaluation.model import Model
    from diffmegatron.evaluation.targets import Target

# What an item came to, as JSON holds it.
Record = dict[str, Any]
Records = Sequence[Record]
Window = Annotated[Size, Field(ge=2)]
"""Tokens of a window of text: the start token, and one at least whose loss counts."""


class Item(NamedTuple):
    """One thing that a model is asked.

    Attributes:
        key: tells it from the suite's other items; the same for every target.
        tokens: how long a context the model needs for it; 0: none.
        content: of plain values, whose ``repr`` says what is asked.
    """

    key: str
    tokens: int
    content: Any


class Mean(NamedTuple):
    """An item's share of a measure, which is the sum of totals over the sum of weights.

    Attributes:
        total: such as a negative log-likelihood, or 1 for a right answer.
        weight: such as the number of tokens.
        per_token: it counts tokens, so that it compares models of one tokenizer only.
    """

    total: float
    weight: float = 1.0
    per_token: bool = False


class Estimate(NamedTuple):
    """A number with its interval.

    Attributes:
        value: on all items.
        low, high: the 2.5% and 97.5% percentiles over the resamples; None of fewer than 2 units.
        items: number of units (:meth:`Suite.unit`) that it was measured on; None if it is not of
            units.
    """

    value: float
    low: float | None
    high: float | None
    items: int | None


class Published(NamedTuple):
    """A number of a paper.

    Attributes:
        measure: of the suite.
        differential, transformer: of the paper's pair; the latter may not be given.
        of: which pair, and where it stands.
    """

    measure: str
    differential: float
    transformer: float | None
    of: str


class Suite(Section, ABC):
    """The settings of a suite, and what it does.

    A field ``data``, ``haystack`` or ``data_dir`` is the command line's option of that name; a
    field ``context`` is the shortest context of the targets, unless it is set.
    """

    name: ClassVar[str]
    # What it measures, in a line, and for readers of its tables what is asked and how it is scored.
    title: ClassVar[str]
    description: ClassVar[str]
    # Progress names what the items do and what the follow-ups do, where there are both.
    passes: ClassVar[tuple[str, str]] = ("", "")
    published: ClassVar[tuple[Published, ...]] = ()
    # Whether it reads what training has recorded, and no network.
    reads_runs: ClassVar[bool] = False

    # Whether items that run at the same time do not disturb each other.
    shared: ClassVar[bool] = True
    # Whether it asks a model for losses and tokens alone, so that it can run within training.
    within_training: ClassVar[bool] = False
    # Settings that only follow-ups depend on; the follow-ups' keys tell other ones apart.
    of_follow_ups: ClassVar[frozenset[str]] = frozenset()

    @property
    def only_writes(self) -> bool:
        """Whether models only write texts for it, without labels to choose from."""
        return False

    @property
    def one_tokenizer(self) -> bool:
        """Whether nothing of it compares models of several tokenizers."""
        return False

    def check(self, target: "Target") -> None:
        """Check, before anything runs, that the suite can be asked of a target.

        Raises:
            UserError: it cannot; what would be right.
        """
        return

    @abstractmethod
    def items(self, target: "Target") -> Sequence[Item]:
        """What is asked of a target, in an order that never changes.

        Raises:
            UserError: data are missing or cannot be read.
        """

    def follow_ups(self, target: "Target", records: Records) -> Sequence[Item]:
        """Items that only the records of all others make known; by default none."""
        return ()

    def ask(self, target: "Target", item: Item) -> Asking:
        """Yield requests to the model, receive their answers, and return the record of an item.

        The requests of many items are answered in batches. Suites that look into the network
        define :meth:`score` instead, for one item at a time.
        """
        raise NotImplementedError(f"suite {self.name!r} defines neither ask nor score")

    def score(self, model: "Model", item: Item) -> Record:
        """Return the record of an item, the same whenever and in whatever order it is scored.

        Raises:
            NotFiniteError: the model's numbers are not finite.
        """
        ((_, record),) = run_askings(model, [(item.key, self.ask(model.target, item))])
        if isinstance(record, NotFiniteError):
            raise record
        return record

    def scores(
        self, model: "Model", items: Sequence[Item]
    ) -> Iterator[tuple[str, Record | NotFiniteError]]:
        """Yield the key of each item with its record, or with the reason why it has none.

        Items of :meth:`ask` come in the order in which the model finishes them.
        """
        if type(self).score is Suite.score:
            asked = ((item.key, self.ask(model.target, item)) for item in items)
            yield from run_askings(model, asked)
            return
        for item in items:
            try:
                yield item.key, self.score(model, item)
            except NotFiniteError as error:
                yield item.key, error

    def means(self, record: Record) -> Mapping[str, Mean]:
        """An item's share of every measure that it has a part in."""
        return {}

    def unit(self, key: str, record: Record) -> str:
        """Return what intervals draw again: items of one unit are drawn together.

        An item is a unit of its own by default. Items that ask the same question in several ways
        are not independent; intervals that draw them one by one are too narrow.
        """
        return key

    def better(self, measure: str) -> Literal["higher", "lower"] | None:
        """Return which values of a measure or total are better, or None if neither is."""
        return None

    def ordered(self, measures: Sequence[str]) -> list[str]:
        """The measures as they stand in the report; by default as the items brought them up."""
        return list(measures)

    def totals(self, records: Records) -> Mapping[str, float | Estimate]:
        """Return numbers of a target that are not means over its items."""
        return {}

    def across(self, records: Mapping[str, Records]) -> Mapping[str, float]:
        """Numbers of all targets together, from their records by name."""
        return {}

    def details(self, records: Mapping[str, Records]) -> Mapping[str, Any]:
        """Return what programs read in ``results.json`` beside the measures of all targets."""
        return {}

    def remarks(self, records: Mapping[str, Records]) -> Sequence[str]:
        """What could not be made of the records of all targets and why, one sentence each."""
        return ()

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw the records of the targets; whether there was something to draw."""
        return False
