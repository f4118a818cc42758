"""Scores of many items at a time, so that a model can answer their requests in batches."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.requests import Answer, Asking, Request

# Items whose requests are sorted into batches together. More would fill the memory with token ids.
_OPEN_ITEMS = 1024


class Answers(Protocol):
    """Whatever answers requests: a model, or an engine that serves it."""

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield the number of each request with its answer, in any order."""


class _Open:
    """An item whose requests are being answered.

    Attributes:
        key: of the item.
        requests: the last ones that the suite yielded.
        record: of the item, once the suite has returned it.
    """

    def __init__(self, key: str, asking: Asking) -> None:
        self.key, self._asking = key, asking
        self.record: dict[str, Any] | NotFiniteError | None = None
        self._advance(None)

    def receive(self, number: int, answer: Answer) -> None:
        """Keep the answer of a request; with the last one, let the suite go on."""
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

    The order is that in which the model finishes them.

    Args:
        model: receives the requests of up to 1,024 items together.
        askings: keys of items with the generators of :meth:`Suite.ask`.
    """
    left = iter(askings)
    while window := list(islice(left, _OPEN_ITEMS)):
        items = []
        for key, asking in window:
            item = _Open(key, asking)
            # Some ask another model, which may fail at the next one.
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
