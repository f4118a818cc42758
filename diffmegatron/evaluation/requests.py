"""Requests of suites (benchmarks) to a model: likelihoods of given tokens, and greedy decoding."""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from diffmegatron.errors import NotFiniteError


class LabelTree(dict[int, "LabelTree"]):
    """Prefix tree of labels (allowed answers): next token id -> subtree. A leaf has a ``label``."""

    label: str | None = None

    @property
    def depth(self) -> int:
        """Largest number of tokens from this node to a leaf."""
        return 1 + max(each.depth for each in self.values()) if self else 0


class Scoring(NamedTuple):
    """A request for the likelihoods of continuations of a context.

    The context and each continuation have at least one token id. The answer is a list with a
    :class:`Scored` for each continuation.
    """

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]


class Scored(NamedTuple):
    """The answer for one continuation of n tokens; the tensors are on the CPU.

    Attributes:
        losses: negative log-likelihood in nats of each token given all tokens before it,
            float32 [n].
        is_most_likely: whether each token is the most likely token at its position, bool [n].
            Empty during training, where the forward pass returns losses and no logits.
    """

    losses: Tensor
    is_most_likely: Tensor


class Generation(NamedTuple):
    """A request for greedy decoding after ``ids``, the token ids of a prompt.

    The answer is the list of new token ids. With ``labels``, it has the ids of one label.
    Without ``labels``, the text ends before an end-of-document token, after ``limit`` tokens, or
    with the token that completes a string of ``stop``.

    Attributes:
        shared: number of tokens, below ``len(ids)``, at the start of ``ids`` that other requests
            share. Their keys and values may be computed once for all requests.
        labels: the allowed answers; None for free text.
    """

    ids: Sequence[int]
    limit: int
    stop: tuple[str, ...] = ()
    shared: int = 0
    labels: LabelTree | None = None


Request = Scoring | Generation
# Scoring -> list[Scored], Generation -> list[int]; an error if a result is NaN or infinite.
Answer = list[Scored] | list[int] | NotFiniteError
# Yields requests, receives their answers in the same order, and returns the record of an item.
ItemGenerator = Generator[Sequence[Request], Sequence[Any], dict[str, Any]]
