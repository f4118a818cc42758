"""Requests of suites to a model: likelihoods of given tokens, and greedy decoding."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from diffmegatron.errors import NotFiniteError


class LabelTree(dict[int, "LabelTree"]):
    """Tokens that may follow, each with its own subtree; a leaf has the label that ends there."""

    label: str | None = None

    @property
    def depth(self) -> int:
        """Number of tokens to the farthest leaf."""
        return 1 + max(each.depth for each in self.values()) if self else 0


class Scoring(NamedTuple):
    """A request for the likelihoods of continuations of one context.

    The answer is a list with a :class:`Scored` for each continuation.

    Attributes:
        context: token ids, one or more.
        continuations: token ids of each, one or more.
    """

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]


class Scored(NamedTuple):
    """The answer for one continuation of n tokens, on the CPU.

    Attributes:
        nats: negative log-likelihood of each token given all before it, float32 [n].
        likeliest: whether each is the most likely token at its place, bool [n]. Empty within
            training, where it would take another forward pass.
    """

    nats: Tensor
    likeliest: Tensor


class Generation(NamedTuple):
    """A request for the most likely token after ``ids``, again and again.

    The answer is the list of new token ids. It ends before the token that ends a document, after
    ``limit`` tokens, or with the token that completes one of the strings of ``stop``.

    Attributes:
        ids: token ids of the prompt, one or more.
        limit: largest number of new tokens, 1 or more.
        stop: strings that end the text.
        shared: number of first ids that other requests have too, less than ``len(ids)``: their
            keys and values are computed once.
        labels: tokens that may follow; the answer is then a path from the root to a leaf.
    """

    ids: Sequence[int]
    limit: int
    stop: tuple[str, ...] = ()
    shared: int = 0
    labels: LabelTree | None = None


Request = Scoring | Generation
# Scored of Scoring, token ids of Generation, or the reason why there are none.
Answer = list[Scored] | list[int] | NotFiniteError
# A suite yields requests, receives their answers in the same order, and returns a record.
Asking = Generator[Sequence[Request], Sequence[Any], dict[str, Any]]
