"""Stand-ins for :class:`Model` and its method ``answers``."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Request


class Answering:
    """Stand-in for :class:`Model` that computes each answer with a function.

    Args:
        answer: function that returns the answer to a request.
        target: target of the model.
    """

    def __init__(self, answer: Callable[[Any], Any], target: Any = None) -> None:
        self._answer, self.target = answer, target

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        for number, request in enumerate(requests):
            yield number, self._answer(request)


def answering(answer: Callable[[Model, Any], Any]) -> Callable:
    """Return a replacement for ``Model.answers`` that calls ``answer(model, request)``."""

    def answers(model: Model, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        for number, request in enumerate(requests):
            yield number, answer(model, request)

    return answers
