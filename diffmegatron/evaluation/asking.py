"""Scores of many items at once, so that a model can answer their requests in batches."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.requests import Answer, Asking, Request

# Items whose requests are batched together. The token ids of more items would fill the memory.
_OPEN_ITEMS = 1024


class Answers(Protocol):
    """A model, or an engine that serves a model."""

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield the number of each request with its answer, in any order."""


class _Open:
    """An item whose requests are being answered.

    Attributes:
        key: key of the item.
        requests: requests that the suite yielded last.
        record: record of the item, or the error of an answer; None until then.
    """

    def __init__(self, key: str, asking: Asking) -> None:
        self.key, self._asking = key, asking
        self.record: dict[str, Any] | NotFiniteError | None = None
        self._advance(None)

    def receive(self, number: int, answer: Answer) -> None:
        """Store the answer to a request; after the last one, send all answers to the suite."""
        self._answers[number] = answer
        if isinstance(answer, NotFiniteError):
            self.record = answer
        elif len(self._answers) == len(self.requests) and self.record is None:
            self._advance([self._answers[place] for place in range(len(self.requests))])

    def _advance(self, answers: list[Any] | None) -> None:
        self._answers: dict[int, Answer] = {}
        self.requests: list[Request] = []
        try:
            while not self.requests:
                self.requests = list(self._asking.send(answers))  # type: ignore[arg-type]
                answers = []
        except StopIteration as end:
            self.record = end.value


def run_askings(
    model: Answers, askings: Iterable[tuple[str, Asking]]
) -> Iterator[tuple[str, dict[str, Any] | NotFiniteError]]:
    """Yield the key of each item with its record, or with the reason why it has none.

    Items come in the order in which the model finishes them.

    Args:
        model: model, which receives the requests of up to 1,024 items together.
        askings: keys of items with the generators of :meth:`Suite.ask`.
    """
    left = iter(askings)
    while window := list(islice(left, _OPEN_ITEMS)):
        items = []
        for key, asking in window:
            item = _Open(key, asking)
            # An item without requests has asked another model, which may fail at the next item.
            if item.record is not None:
                yield item.key, item.record
            items.append(item)
        while items := [item for item in items if item.record is None]:
            places = [(item, number) for item in items for number in range(len(item.requests))]
            requests = [item.requests[number] for item, number in places]
            for place, answer in model.answers(requests):
                item, number = places[place]
                had_record = item.record is not None
                item.receive(number, answer)
                if item.record is not None and not had_record:
                    yield item.key, item.record
