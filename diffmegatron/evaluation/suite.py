"""The base class of the suites (benchmarks) of an evaluation.

A suite is a class in a file of ``suites/``, listed in ``SUITES`` there. Its fields are settings.
Its methods define the items (such as questions), the requests to a model, and the score of an item.
Restarts, progress, intervals, comparison and reports are the same for all suites, so a suite does
not define them. A target is a model to evaluate.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.batched_scoring import score_items
from diffmegatron.evaluation.requests import ItemGenerator
from diffmegatron.section import Section, Size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from diffmegatron.evaluation.model import Model
    from diffmegatron.evaluation.targets import Target

# The recorded result of an item, in types of JSON.
Record = dict[str, Any]
Records = Sequence[Record]
Direction = Literal["higher", "lower"]
Window = Annotated[Size, Field(ge=2)]
"""Number of tokens of a window of text, at least 2: a first token, which is never scored (the start
token in most suites), and at least one token to score."""


class Item(NamedTuple):
    """The smallest part of a suite that is scored and recorded, such as a question or a document.

    Attributes:
        key: name within the suite; the same for every target.
        tokens: number of tokens that the model's context must hold; 0 if any context suffices, for
            example because no model is needed.
        content: values from which the suite makes the requests. A restarted evaluation uses the
            recorded results only if a hash of the items' ``repr`` is unchanged. Items with
            different requests must therefore differ in the ``repr`` of these values.
    """

    key: str
    tokens: int
    content: Any


class Mean(NamedTuple):
    """An item's contribution to a measure; a measure is a number such as an accuracy.

    The measure is the sum of the totals of all items divided by the sum of their weights.

    Attributes:
        total: contribution to the sum, for example a negative log-likelihood, or 1 for a correct
            answer.
        weight: contribution to the divisor, for example the number of tokens.
        per_token: whether the measure depends on the division of a text into tokens, so that it can
            only be compared between models with the same tokenizer.
    """

    total: float
    weight: float = 1.0
    per_token: bool = False


class Estimate(NamedTuple):
    """A number with its 95% interval.

    Attributes:
        value: value on all items.
        low, high: ends of the interval; None if there is no interval. For a bootstrap they are the
            2.5% and 97.5% percentiles of the resamples, and None if there are fewer than 2 units.
        units: number of units, the groups of items that a resample draws together
            (:meth:`Suite.unit`); None if the value is not computed from units.
    """

    value: float
    low: float | None
    high: float | None
    units: int | None


class Published(NamedTuple):
    """A measure's values in a paper, which the report prints beside the targets' values.

    Attributes:
        measure: name of the suite's measure.
        differential: value of the Differential Transformer.
        transformer: value of the Transformer; None if the paper does not give it.
        source: size of the paper's models, and the table.
    """

    measure: str
    differential: float
    transformer: float | None
    source: str


class Suite(Section, ABC):
    """Base of all suites.

    If a suite has a field ``data``, ``haystack`` or ``data_dir``, the command-line option of the
    same name sets it. If it has a field ``context``, the command line's default for it is the
    shortest context of the targets, but at most 2,048 tokens.

    Attributes:
        name: name on the command line.
        title: the measured quantity, in a line.
        description: the requests and the score, for readers of the report.
        passes: names, for progress lines, of the pass over the items and of the pass over the
            follow-up items (:meth:`follow_ups`). Both are empty if there are no follow-ups.
        published: values from papers, for the report.
        reads_attention: whether the suite reads attention logits or maps, so that it needs a known
            kind of attention.
        reads_runs: whether the suite reads only training records of runs and uses no network.
        is_parallel: whether several processes may score items at the same time.
        within_training: whether the suite needs only losses and generated tokens, so that it can
            run during training.
        follow_up_settings: names of fields that affect only the follow-ups. After a restart with
            other values of these fields, recorded follow-ups are still used. The key of a follow-up
            must therefore contain the values on which its record depends.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    passes: ClassVar[tuple[str, str]] = ("", "")
    published: ClassVar[tuple[Published, ...]] = ()
    reads_attention: ClassVar[bool] = False
    reads_runs: ClassVar[bool] = False
    is_parallel: ClassVar[bool] = True
    within_training: ClassVar[bool] = False
    follow_up_settings: ClassVar[frozenset[str]] = frozenset()

    @property
    def requests_only_free_text(self) -> bool:
        """True if the suite needs only generated free text: no likelihoods, labels, activations."""
        return False

    @property
    def needs_one_tokenizer(self) -> bool:
        """True if all targets must have the same tokenizer."""
        return False

    def check(self, target: "Target") -> None:
        """Check, before anything runs, that the suite supports a target.

        Raises:
            UserError: the suite does not support the target, or data are missing.
        """
        if self.reads_attention:
            # The property raises an error if the kind of attention is unknown.
            _ = target.variant

    @abstractmethod
    def items(self, target: "Target") -> Sequence[Item]:
        """Return the items for a target, always in the same order.

        Raises:
            UserError: data are missing or cannot be read.
        """

    def follow_ups(self, target: "Target", records: Records) -> Sequence[Item]:
        """Return further items to score, which may depend on the records of all items."""
        return ()

    def requests_of(self, target: "Target", item: Item) -> ItemGenerator:
        """Yield lists of requests to the model, and return the record of an item.

        Each ``yield`` receives the answers to its requests, in the same order. The requests of many
        items are answered in batches. A suite that reads activations of the network overrides
        :meth:`score` instead, which scores one item at a time.
        """
        # Not abstract, because a suite overrides either this method or `score`.
        raise NotImplementedError(f"suite {self.name!r} defines neither requests_of nor score")

    def score(self, model: "Model", item: Item) -> Record:
        """Return the record of an item.

        The record must not depend on other items or on the order of items.

        Raises:
            NotFiniteError: the model computes a number that is not finite.
        """
        ((_, record),) = score_items(model, [(item.key, self.requests_of(model.target, item))])
        if isinstance(record, NotFiniteError):
            raise record
        return record

    def scores(
        self, model: "Model", items: Sequence[Item]
    ) -> Iterator[tuple[str, Record | NotFiniteError]]:
        """Yield the key of each item with its record, or with the error that prevented a record.

        A suite that overrides :meth:`score` yields the items in their order. For the other suites,
        which define :meth:`requests_of`, the order depends on the batches into which the model
        divides the requests of all items.
        """
        if type(self).score is Suite.score:
            generators = ((item.key, self.requests_of(model.target, item)) for item in items)
            yield from score_items(model, generators)
            return
        for item in items:
            try:
                yield item.key, self.score(model, item)
            except NotFiniteError as error:
                yield item.key, error

    def means(self, record: Record) -> Mapping[str, Mean]:
        """Return a mapping from the name of each measure to the item's contribution to it."""
        return {}

    def unit(self, key: str, record: Record) -> str:
        """Return the name of an item's unit; the resamples of the bootstrap draw whole units.

        By default every item is a unit. A suite whose items are not independent, for example
        because several items ask the same question, must combine these items into one unit. If
        resamples drew them one by one, intervals would be too narrow.
        """
        return key

    def better(self, measure: str) -> Direction | None:
        """Return "higher" or "lower", whichever values of a measure are better; None if neither.

        Args:
            measure: name of a number that :meth:`means` or :meth:`totals` defines.
        """
        return None

    def ordered(self, measures: Sequence[str]) -> list[str]:
        """Return the names of measures in the order of the report.

        Args:
            measures: names in the order in which they first occur in the items' records.
        """
        return list(measures)

    def totals(self, records: Records) -> Mapping[str, float | Estimate]:
        """Return a dict of numbers of one target that are not means over items.

        Args:
            records: records of all items of the target.

        Returns:
            Name of each number -> its value.
        """
        return {}

    def across(self, records: Mapping[str, Records]) -> Mapping[str, float]:
        """Return a dict of numbers that depend on the records of several targets.

        Args:
            records: name of each target -> records of all its items.

        Returns:
            Name of each number -> its value.
        """
        return {}

    def details(self, records: Mapping[str, Records]) -> Mapping[str, Any]:
        """Return further values for ``results.json``, which the report does not show.

        Args:
            records: name of each target -> records of all its items.
        """
        return {}

    def remarks(self, records: Mapping[str, Records]) -> Sequence[str]:
        """Return sentences for the report, such as the reason why a result is missing.

        Args:
            records: name of each target -> records of all its items.
        """
        return ()

    def draw(self, figure: "Figure", records: Mapping[str, Records]) -> bool:
        """Draw the targets' records into ``figure``, and return whether anything was drawn.

        Args:
            figure: empty figure.
            records: name of each target -> records of all its items.
        """
        return False
