"""Stand-ins for a model's answers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Request


class Answering:
    """A model that answers each request by a function.

    Args:
        answer: returns the answer to a request.
        target: the target to which the model belongs.
    """

    def __init__(self, answer: Callable[[Any], Any], target: Any = None) -> None:
        self._answer, self.target = answer, target

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        for number, request in enumerate(requests):
            yield number, self._answer(request)


def answering(answer: Callable[[Model, Any], Any]) -> Callable:
    """Return a method for :class:`Model` that answers a request by ``answer(model, request)``."""

    def answers(model: Model, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        for number, request in enumerate(requests):
            yield number, answer(model, request)

    return answers
