"""Scoring of many items at once, so that a model can answer their requests in batches."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.requests import Answer, ItemGenerator, Request

if TYPE_CHECKING:
    from diffmegatron.evaluation.model import Model

# Number of items that are scored at the same time. Their requests, with all token ids, are in
# memory together.
_OPEN_ITEMS = 1024


class _OpenItem:
    """An item whose requests are being answered; its record is None until it is complete."""

    def __init__(self, key: str, generator: ItemGenerator) -> None:
        self.key, self._generator = key, generator
        self.record: dict[str, Any] | NotFiniteError | None = None
        self._advance(None)

    def receive(self, number: int, answer: Answer) -> None:
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
                self.requests = list(self._generator.send(answers))  # type: ignore[arg-type]
                answers = []
        except StopIteration as end:
            self.record = end.value


def score_items(
    model: "Model", generators: Iterable[tuple[str, ItemGenerator]]
) -> Iterator[tuple[str, dict[str, Any] | NotFiniteError]]:
    """Yield the key of each item with its record, or with the error that prevented a record.

    Items are yielded in the order in which the model completes them.

    Args:
        generators: key and generator (from :meth:`Suite.requests_of`) of each item.
    """
    left = iter(generators)
    while window := list(islice(left, _OPEN_ITEMS)):
        items = []
        for key, generator in window:
            item = _OpenItem(key, generator)
            # Without requests to the model, the item is complete already. The suite may have called
            # an external model, which may fail at the next item, so let the caller save the record.
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
