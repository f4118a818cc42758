"""Requests of suites to a model: likelihoods of given tokens, and greedy decoding."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from diffmegatron.errors import NotFiniteError


class LabelTree(dict[int, "LabelTree"]):
    """Tree of the tokens of labels: possible next tokens, each with its subtree.

    Attributes:
        label: label that ends at a leaf.
    """

    label: str | None = None

    @property
    def depth(self) -> int:
        """Number of tokens to the farthest leaf."""
        return 1 + max(each.depth for each in self.values()) if self else 0


class Scoring(NamedTuple):
    """A request for the likelihoods of continuations of one context.

    The answer is a list with a :class:`Scored` for each continuation.

    Attributes:
        context: one or more token ids.
        continuations: one or more token ids for each continuation.
    """

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]


class Scored(NamedTuple):
    """The answer for one continuation of n tokens, on the CPU.

    Attributes:
        nats: negative log-likelihood of each token given all tokens before it, float32 [n].
        likeliest: whether each token is the most likely one, bool [n]. Empty within training,
            where another forward pass would be necessary.
    """

    nats: Tensor
    likeliest: Tensor


class Generation(NamedTuple):
    """A request for greedy decoding after ``ids``.

    The answer is the list of new token ids. It ends before the token that ends a document, after
    ``limit`` tokens, or with the token that completes a string of ``stop``.

    Attributes:
        ids: token ids of the prompt, one or more.
        limit: largest number of new tokens, 1 or more.
        stop: strings that end the text.
        shared: number of first ids that other requests share, less than ``len(ids)``. Their keys
            and values are computed once.
        labels: labels to choose from; the answer is a path from the root to a leaf.
    """

    ids: Sequence[int]
    limit: int
    stop: tuple[str, ...] = ()
    shared: int = 0
    labels: LabelTree | None = None


Request = Scoring | Generation
# The answer to Scoring is Scored, the answer to Generation is token ids; or an error.
Answer = list[Scored] | list[int] | NotFiniteError
# A suite yields requests, receives their answers in the same order, and returns a record.
Asking = Generator[Sequence[Request], Sequence[Any], dict[str, Any]]
