"""Requests of suites (benchmarks) to a model: likelihoods of given tokens, and greedy decoding.

A request may restrict decoding to some allowed answers, called labels.
"""

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from diffmegatron.errors import NotFiniteError


class LabelTree(dict[int, "LabelTree"]):
    """Prefix tree of the token sequences of labels: maps each possible next token to a subtree.

    Attributes:
        label: label whose token sequence ends at this node, if the node is a leaf; otherwise None.
    """

    label: str | None = None

    @property
    def depth(self) -> int:
        """Number of tokens on the longest path from this node to a leaf."""
        return 1 + max(each.depth for each in self.values()) if self else 0


class Scoring(NamedTuple):
    """A request for the likelihoods of continuations of one context.

    The answer is a list with a :class:`Scored` for each continuation.

    Attributes:
        context: token ids of the context; it has at least one token.
        continuations: token ids of each continuation; each has at least one token.
    """

    context: Sequence[int]
    continuations: Sequence[Sequence[int]]


class Scored(NamedTuple):
    """The answer for one continuation of n tokens; the tensors are on the CPU.

    Attributes:
        losses: negative log-likelihood in nats of each token given all tokens before it,
            float32 [n].
        is_most_likely: whether each token is the most likely token at its position, bool [n].
            Empty for suites that run during training: the forward pass there returns losses and no
            logits, so this value would need a second forward pass.
    """

    losses: Tensor
    is_most_likely: Tensor


class Generation(NamedTuple):
    """A request for greedy decoding after ``ids``.

    The answer is the list of new token ids. With ``labels``, it ends with the last token of a
    label. Without ``labels``, it ends before an end-of-document token, after ``limit`` tokens, or
    with the token that completes a string of ``stop``.

    Attributes:
        ids: token ids of the prompt, one or more.
        limit: maximum number of new tokens, 1 or more.
        stop: strings at which decoding ends.
        shared: number of tokens at the beginning of ``ids`` that other requests share, less than
            ``len(ids)``. The keys and values of shared tokens are computed once.
        labels: labels to choose from, so that the answer is a path from the root to a leaf; None
            for free text.
    """

    ids: Sequence[int]
    limit: int
    stop: tuple[str, ...] = ()
    shared: int = 0
    labels: LabelTree | None = None


Request = Scoring | Generation
# The answer to Scoring is a list of Scored, and the answer to Generation is a list of token ids. If
# the model computes a number that is not finite, the answer is a NotFiniteError.
Answer = list[Scored] | list[int] | NotFiniteError
# Generator of a suite for one item (an example to score). It yields requests, receives the answers
# in the same order, and returns the item's record, from which the suite computes its score.
ItemGenerator = Generator[Sequence[Request], Sequence[Any], dict[str, Any]]
