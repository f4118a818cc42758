"""The base class of the suites of an evaluation.

A suite is a class in a file of ``suites/``, listed in ``SUITES`` there. Its fields are settings.
Its methods define the items, the requests to a model, and the score of an item. Restarts,
progress, intervals, comparison and reports are the same for all suites.
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

# The score of an item, in types of JSON.
Record = dict[str, Any]
Records = Sequence[Record]
Direction = Literal["higher", "lower"]
Window = Annotated[Size, Field(ge=2)]
"""Number of tokens of a window of text: the start token, and one or more whose loss counts."""


class Item(NamedTuple):
    """A part of a suite that is scored and recorded by itself.

    Attributes:
        key: name within the suite; the same for every target.
        tokens: length of the context that the model needs; 0: none.
        content: plain values, whose ``repr`` identifies the requests.
    """

    key: str
    tokens: int
    content: Any


class Mean(NamedTuple):
    """An item's contribution to a measure: the sum of totals over the sum of weights.

    Attributes:
        total: for example a negative log-likelihood, or 1 for a correct answer.
        weight: for example the number of tokens.
        per_token: whether tokens are counted, so that only models of one tokenizer compare.
    """

    total: float
    weight: float = 1.0
    per_token: bool = False


class Estimate(NamedTuple):
    """A number with its interval.

    Attributes:
        value: value on all items.
        low, high: 2.5% and 97.5% percentiles over the resamples; None for fewer than 2 units.
        items: number of units (:meth:`Suite.unit`); None if the number does not come from units.
    """

    value: float
    low: float | None
    high: float | None
    items: int | None


class Published(NamedTuple):
    """A number of a paper.

    Attributes:
        measure: measure of the suite.
        differential, transformer: numbers of the paper's two models; the latter may be missing.
        of: the models, and the place in the paper.
    """

    measure: str
    differential: float
    transformer: float | None
    of: str


class Suite(Section, ABC):
    """Base of all suites.

    The command line's options set the fields ``data``, ``haystack`` and ``data_dir``. A field
    ``context`` defaults to the shortest context of the targets.

    Attributes:
        name: name on the command line.
        title: the measured quantity, in a line.
        description: the requests and the score, for readers of the report.
        passes: names of the pass over the items and of the pass over the follow-ups, for progress;
            empty without follow-ups.
        published: numbers of papers.
        reads_runs: whether the suite reads records of training and no network.
        is_parallel: whether several processes may score items at the same time.
        within_training: whether the suite only needs losses and tokens, so that it can run within
            training.
        follow_up_settings: fields that only the follow-ups depend on. The keys of follow-ups
            distinguish their values.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    passes: ClassVar[tuple[str, str]] = ("", "")
    published: ClassVar[tuple[Published, ...]] = ()
    reads_runs: ClassVar[bool] = False
    is_parallel: ClassVar[bool] = True
    within_training: ClassVar[bool] = False
    follow_up_settings: ClassVar[frozenset[str]] = frozenset()

    @property
    def only_generates(self) -> bool:
        """True if models only generate free text, without labels to choose from."""
        return False

    @property
    def needs_one_tokenizer(self) -> bool:
        """True if all targets must have the same tokenizer."""
        return False

    def check(self, target: "Target") -> None:
        """Check, before anything runs, that the suite supports a target.

        Raises:
            UserError: the suite does not support it, or data are missing.
        """
        return

    @abstractmethod
    def items(self, target: "Target") -> Sequence[Item]:
        """Return the items for a target, always in the same order.

        Raises:
            UserError: data are missing or cannot be read.
        """

    def follow_ups(self, target: "Target", records: Records) -> Sequence[Item]:
        """Return further items, which depend on the records of all items."""
        return ()

    def ask(self, target: "Target", item: Item) -> Asking:
        """Yield requests to the model, receive their answers, and return the record of an item.

        The requests of many items are answered in batches. A suite that reads activations of the
        network overrides :meth:`score` instead, which scores one item at a time.
        """
        # Not abstract, because a suite overrides either this method or `score`.
        raise NotImplementedError(f"suite {self.name!r} defines neither ask nor score")

    def score(self, model: "Model", item: Item) -> Record:
        """Return the record of an item. It does not depend on other items or on their order.

        Raises:
            NotFiniteError: the model computes a number that is not finite.
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
        """Return an item's contribution to each of its measures."""
        return {}

    def unit(self, key: str, record: Record) -> str:
        """Return the unit of an item; resamples for intervals draw whole units.

        By default every item is a unit. If several items ask the same question, they are not
        independent, and intervals that draw them one by one would be too narrow.
        """
        return key

    def better(self, measure: str) -> Direction | None:
        """Return which values of a measure or total are better, or None if neither is."""
        return None

    def ordered(self, measures: Sequence[str]) -> list[str]:
        """Return the measures in the order of the report; the argument has the items' order."""
        return list(measures)

    def totals(self, records: Records) -> Mapping[str, float | Estimate]:
        """Return numbers of a target that are not means over its items."""
        return {}

    def across(self, records: Mapping[str, Records]) -> Mapping[str, float]:
        """Return numbers that depend on the records of all targets."""
        return {}

    def details(self, records: Mapping[str, Records]) -> Mapping[str, Any]:
        """Return values for programs, which ``results.json`` has beside the measures."""
        return {}

    def remarks(self, records: Mapping[str, Records]) -> Sequence[str]:
        """Return a sentence for each result that is missing, with the reason."""
        return ()

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw the records of the targets, and return whether anything was drawn."""
        return False
