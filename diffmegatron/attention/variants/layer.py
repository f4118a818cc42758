"""Interfaces that a variant's ``forward`` uses: its layer, and attention to the whole sequence.

A variant is a kind of attention.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from diffmegatron.attention.kernels.api import HeadwiseNorm


class Layer(Protocol):
    """The members of a layer that a variant may use (attention/self_attention.py).

    Attributes:
        layer_number: number of the layer from 1, over all pipeline stages.
        norm_eps: number that norms add to the mean square.
        step: number of optimizer steps that produced the network's weights.
    """

    layer_number: int
    norm_eps: float
    step: int

    def share(self, count: int) -> range:
        """Divide ``count`` items equally among the tensor-parallel ranks.

        Returns:
            The indices of this rank's items.
        """

    def parameter(self, name: str) -> "Tensor":
        """Return the parameter ``name``, which the variant declared, or this rank's shard of it."""

    def project(self, name: str, hidden: "Tensor") -> "Tensor":
        """Multiply hidden states by the declared parameter ``name``, a matrix sharded by rows.

        Args:
            name: name of the matrix, [rows, hidden].
            hidden: hidden states, [s, b, hidden].

        Returns:
            [s, b, rows of this rank].
        """

    def observe(self, name: str, value: "Tensor") -> None:
        """Store the mean over all elements of ``value``, which the log shows under ``name``."""


class Context(Protocol):
    """Causal attention to the whole sequence, on one device or on several ranks.

    If one device has the whole sequence, the methods are the functions of
    :mod:`diffmegatron.attention.kernels.api`. With context parallelism,
    :mod:`diffmegatron.attention.context_parallel.whole_sequence` adds the communication. All
    tensors are `[b, s, heads, width]` of this rank's shard of the sequence, with b sequences and s
    positions. d is the width of a query, and h the number of heads of Q1.
    """

    def softmax_attention(self, q: "Tensor", k: "Tensor", v: "Tensor", /) -> "Tensor":
        """Return softmax(Q K^T / sqrt(d)) V of every query head: `[b, s, heads, d]`."""

    def diff_attention(
        self,
        q1: "Tensor",
        k1: "Tensor",
        q2: "Tensor",
        k2: "Tensor",
        v: "Tensor",
        /,
        *,
        lambda_: "Tensor",
        norm: "HeadwiseNorm | None" = None,
    ) -> "Tensor":
        """Return differential attention, `[b, s, h, 2d]`.

        The result is (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V, to which
        ``norm`` is then applied, if given. ``lambda_`` is a 0-dim tensor, the same for all heads.
        """
