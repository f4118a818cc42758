"""Types that a kind of attention and the layer ``SelfAttention`` share.

A kind declares its `Heads` and `Parameter` objects. Its method ``forward`` receives a `Layer`
and a `Context`. In shapes b is the number of sequences, and s the number of positions on this
context-parallel rank.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from diffmegatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# Names of parameters with a meaning for the layer: the bias of `linear_qkv`, the weights of the
# RMSNorms of queries and of keys before their rotation, and the matrix of the gate of each head's
# output. `HEAD_NORM` is the weight of the RMSNorm of each head's output, which a kind applies
# itself.
QKV_BIAS = "linear_qkv.bias"
QK_NORMS = ("q_norm", "k_norm")
OUTPUT_GATE = "output_gate"
HEAD_NORM = "head_norm"
Rows = tuple[tuple[Literal["q", "k", "v", "g"], int], ...]


@dataclass(frozen=True)
class Heads:
    """The heads of one layer in the order of the rows of ``linear_qkv``.

    The rows consist of equal blocks, one per key-value head of the kind. Each rank of tensor
    parallelism or Ulysses has a contiguous range of whole blocks.

    Attributes:
        head_dim: width of a query, key or value head.
        blocks: number of blocks.
        rows: the heads of a block in order, as pairs (kind, number of consecutive heads). Example:
            (("q", 4), ("k", 1), ("v", 1)) has four queries per key. "g" are logits of the gate of
            the outputs, in the order of the output channels.
        outputs: output channels of the attention per block, divided by ``head_dim``.
    """

    head_dim: int
    blocks: int
    rows: Rows
    outputs: int

    def channels(self, kind: str) -> int:
        """Return the number of rows of ``linear_qkv`` for heads of a kind: "q", "k", "v" or "g"."""
        return self._count(kind) * self.head_dim

    def _count(self, kind: str) -> int:
        return self.blocks * sum(count for each, count in self.rows if each == kind)

    @property
    def queries(self) -> int:
        """Number of query heads of the layer."""
        return self._count("q")

    @property
    def keys(self) -> int:
        """Number of key heads of the layer, which is also the number of value heads."""
        return self._count("k")

    @property
    def query_channels(self) -> int:
        """Number of channels of all queries of a token."""
        return self.queries * self.head_dim

    @property
    def key_channels(self) -> int:
        """Number of channels of all keys of a token, which is also that of all values."""
        return self.keys * self.head_dim

    @property
    def qkv_channels(self) -> int:
        """Number of rows of ``linear_qkv``."""
        return sum(map(self.channels, self.parts))

    @property
    def parts(self) -> tuple[str, ...]:
        """Kinds of heads in ``rows``, each once: "q", "k" and "v", and "g" with a gate."""
        return tuple(dict.fromkeys(kind for kind, _ in self.rows))

    @property
    def output_channels(self) -> int:
        """Number of output channels of the attention, the input of ``linear_proj``."""
        return self.blocks * self.outputs * self.head_dim

    @property
    def group(self) -> Rows:
        """Shortest sequence whose repetition is ``rows``; (q, k, v) for rows (q, k, v, q, k, v)."""
        lengths = (n for n in range(1, len(self.rows)) if len(self.rows) % n == 0)
        repeated = (n for n in lengths if self.rows == self.rows[:n] * (len(self.rows) // n))
        return self.rows[: next(repeated, len(self.rows))]

    def gated(self) -> "Heads":
        """Return this layout with a logit "g" for each output channel.

        Every run of queries is followed by an equal share of the logits, so that equal halves of a
        block stay equal.
        """
        share = self.outputs // [kind for kind, _ in self.rows].count("q")
        rows: list[tuple[Literal["q", "k", "v", "g"], int]] = []
        for kind, count in self.rows:
            rows += [(kind, count), ("g", share)] if kind == "q" else [(kind, count)]
        return replace(self, rows=tuple(rows))

    def query_slices(self, keys: int) -> Iterator[slice]:
        """Yield, for each of ``keys`` key heads, the slice of the query heads that attend to it.

        The key heads must form whole blocks. Query heads attend to the key head that follows
        them in ``rows``.
        """
        counts = [count for kind, count in self.rows if kind == "q"]
        first = 0
        for key in range(keys):
            count = counts[key % len(counts)]
            yield slice(first, first + count)
            first += count


class FusedHead(NamedTuple):
    """``head_dim`` rows of ``linear_qkv``, and the matrix to which they belong.

    ``head`` counts the heads of this matrix in a block from 0. A head may have several times
    ``head_dim`` rows, and thus several objects with the same number.
    """

    matrix: str
    head: int


def numbered(matrices: Iterable[str]) -> tuple[FusedHead, ...]:
    """Return heads of ``head_dim`` rows from the names of their matrices, with numbers."""
    counts: Counter[str] = Counter()
    heads = []
    for name in matrices:
        heads.append(FusedHead(name, counts[name]))
        counts[name] += 1
    return tuple(heads)


class Constant(NamedTuple):
    """Initial values that are all equal to one number."""

    value: float


class Identity(NamedTuple):
    """Initial values of a square matrix: the identity times a number."""

    scale: float


@dataclass(frozen=True)
class Parameter:
    """A parameter of attention, except the weights of ``linear_qkv`` and ``linear_proj``.

    Attributes:
        name: name under ``self_attention.`` in checkpoints.
        shape: shape of the unsharded parameter, with one axis or more.
        initial: standard deviation of normally distributed values, a constant, a multiple of the
            identity, or "matrix": as for the other weight matrices.
        role: group for weight decay, and row in which ``plan`` counts the parameter.
        float32: whether it is stored and used in float32 in every precision of a run.
        sharded: whether the first axis is divided among the tensor-parallel ranks, in their order.
            Otherwise every rank holds the whole parameter, and its gradient is summed over them.
    """

    name: str
    shape: tuple[int, ...]
    initial: float | Constant | Identity | Literal["matrix"]
    role: Literal["matrix", "bias", "norm", "lambda"]
    float32: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.role not in ("matrix", "bias", "norm", "lambda"):
            raise UserError(
                f"parameter {self.name!r} has the role {self.role!r}; give matrix, bias, norm or "
                "lambda"
            )
        if not self.shape:
            raise UserError(f"parameter {self.name!r} has no axis; give the shape (1,) to a scalar")


class Layer(Protocol):
    """Members of ``SelfAttention`` (model/layers/self_attention.py) that a kind may use.

    Attributes:
        layer_number: number of the layer, counted from 1 over all pipeline stages.
        norm_eps: epsilon that norms add to the mean square.
        step: number of completed optimizer steps.
    """

    layer_number: int
    norm_eps: float
    step: int

    def share(self, count: int) -> range:
        """Return the indices of this tensor-parallel rank's equal share of ``count`` items."""

    def parameter(self, name: str) -> "Tensor":
        """Return the declared parameter ``name``, or this rank's shard of it."""

    def project(self, name: str, hidden: "Tensor") -> "Tensor":
        """Multiply ``hidden`` [s, b, hidden_size] by the declared, sharded matrix ``name``.

        The matrix is [rows, hidden_size], and the result is [s, b, rows of this rank]. Under
        sequence parallelism, ``hidden`` is this tensor-parallel rank's shard of s.
        """

    def observe(
        self, name: str, value: "Tensor", function: "Callable[[Tensor], Tensor] | None" = None
    ) -> None:
        """Store the mean over all elements of ``function(value)`` for the log, under ``name``.

        Without a function it is the mean of ``value``. It is computed when the log needs it.
        """


class Context(NamedTuple):
    """Functions for causal attention of this rank's queries to the whole sequence.

    q, k, v and the results are `[b, s, heads, width]`. d is the width of a query, and h the number
    of heads of q1.

    Attributes:
        softmax_attention: (q, k, v) -> softmax(Q K^T / sqrt(d)) V of every query head,
            `[b, s, heads, d]`. Values are as wide as queries. Query head n attends to key head
            n // (query heads / key heads); there may be more heads than in the projections.
        diff_attention: (q1, k1, q2, k2, v, lambda_=..., norm=None) ->
            (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V, `[b, s, h, 2d]`.
            ``lambda_`` is a 0-dim tensor. ``norm`` is a `HeadwiseNorm` for the result.
        subtract_noise: (heads, lambda_, sigmoid=False) -> signal - lambda * noise of every signal
            head, `[b, s, h, d]`. ``heads`` are the results of r signal heads, then of their noise
            head. ``lambda_`` is `[b, s, h]`, with ``sigmoid`` the logits of lambda.
        lambda_: this layer's lambda of ``current_lambdas``; None if the kind does not have it, or
            if another network than ours runs the layer.
    """

    softmax_attention: Callable[..., "Tensor"]
    diff_attention: Callable[..., "Tensor"]
    subtract_noise: Callable[..., "Tensor"]
    lambda_: "Tensor | None" = None
