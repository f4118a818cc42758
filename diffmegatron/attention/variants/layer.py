"""Protocols of two arguments of a variant's ``forward``: the layer, and the attention functions."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from diffmegatron.attention.kernels.api import HeadwiseNorm


class Layer(Protocol):
    """Members of ``SelfAttention`` (attention/self_attention.py) that a variant may use.

    Attributes:
        layer_number: number of the layer from 1, over all pipeline stages.
        norm_eps: epsilon that norms add to the mean square.
        step: number of completed optimizer steps.
    """

    layer_number: int
    norm_eps: float
    step: int

    def share(self, count: int) -> range:
        """Return this rank's range of ``count`` items divided among the tensor-parallel ranks."""

    def parameter(self, name: str) -> "Tensor":
        """Return the declared parameter ``name``, or this rank's shard of it."""

    def project(self, name: str, hidden: "Tensor") -> "Tensor":
        """Multiply hidden states [s, b, hidden] by the declared matrix ``name`` [rows, hidden].

        The matrix is sharded by rows, and the result is [s, b, rows of this rank].
        """

    def observe(self, name: str, value: "Tensor") -> None:
        """Store the mean over all elements of ``value`` for the log, under ``name``."""


class Context(Protocol):
    """Causal attention of this rank's queries to the whole sequence.

    All tensors are `[b, s, heads, width]` for b sequences and the s positions of this rank. d is
    the width of a query, and h the number of heads of Q1. The class ``WholeSequence`` in
    attention/context_parallel implements this protocol.
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
        """Return (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V.

        The result is `[b, s, h, 2d]`, normalised by ``norm``. ``lambda_`` is a 0-dim tensor.
        """
