"""What a variant is given to compute with: its layer, and attention to the whole sequence."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from diffmegatron.attention.kernels.api import HeadwiseNorm


class Layer(Protocol):
    """What a variant sees of the layer that computes it (attention/self_attention.py)."""

    layer_number: int
    norm_eps: float
    # Optimizer steps that the network's weights have behind them.
    step: int

    def share(self, count: int) -> range:
        """Which of ``count`` things are this tensor-parallel rank's, shared out as the blocks."""

    def parameter(self, name: str) -> "Tensor":
        """A declared parameter as this rank's heads use it: whole, or the rank's share of it."""

    def project(self, name: str, hidden: "Tensor") -> "Tensor":
        """``hidden`` by a sharded matrix: the whole sequence's [s, b, rows of this rank]."""

    def observe(self, name: str, value: "Tensor") -> None:
        """Keep a number of this forward pass for the log: its mean is taken over this rank."""


class Context(Protocol):
    """Attention over the whole sequence, which one device holds or several share.

    Queries [s, b, heads, d], keys and values [s, b, heads, d] come in the order of ``Heads``.
    """

    def softmax(self, query: "Tensor", key: "Tensor", value: "Tensor") -> "Tensor":
        """Return the output of plain attention per query head, [s, b, heads, d]."""

    def differential(
        self,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        lambda_: "Tensor",
        *,
        signal_per_noise: int,
        norm: "HeadwiseNorm | None",
    ) -> "Tensor":
        """QKV of signal heads less lambda times their noise head's, by values of 2d.

        A block has two keys, whose values side by side are its one value; its signal heads come
        before its noise heads.

        Returns:
            [s, b, signal heads, 2d], normalised where ``norm`` is given.
        """
