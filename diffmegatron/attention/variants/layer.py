"""The arguments of a variant's forward: its layer, and attention to the whole sequence."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from diffmegatron.attention.kernels.api import HeadwiseNorm


class Layer(Protocol):
    """The members of a layer that a variant may use (attention/self_attention.py)."""

    layer_number: int
    norm_eps: float
    # Number of optimizer steps of the network's weights.
    step: int

    def share(self, count: int) -> range:
        """Return the index range of ``count`` items owned by this tensor-parallel rank."""

    def parameter(self, name: str) -> "Tensor":
        """Return this rank's shard of a declared parameter, or the whole if it is not sharded."""

    def project(self, name: str, hidden: "Tensor") -> "Tensor":
        """Multiply the whole sequence by a sharded matrix; return [s, b, rows of this rank]."""

    def observe(self, name: str, value: "Tensor") -> None:
        """Store values of this forward pass for the log, which has their mean over this rank."""


class Context(Protocol):
    """Causal attention to the whole sequence, on one device or on several ranks.

    If one device has the whole sequence, its methods are the functions of
    :mod:`diffmegatron.attention.kernels.api`. Otherwise
    :mod:`diffmegatron.attention.context_parallel.whole_sequence` adds the communication. Heads are
    `[b, s, heads, width]` of this rank's part of the sequence.
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
        """Return (softmax(Q1 K1^T) - lambda softmax(Q2 K2^T)) V, scaled: `[b, s, h, 2d]`."""
