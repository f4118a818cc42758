"""The differential attention of two softmax maps whose values are twice as wide as their queries.

    [Q1; Q2] = X W_Q    [K1; K2] = X W_K    V = X W_V
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    DiffAttn_n(X) = (softmax(Q1_n K1^T / sqrt(d)) - lambda softmax(Q2_m K2^T / sqrt(d))) V
    head_n = (1 - lambda_init) RMSNorm(DiffAttn_n(X))

X is the input of the attention, [tokens, hidden_size]. Per head, Q1, Q2, K1 and K2 are [tokens, d],
and V is [tokens, 2d]. Signal head n and noise head m = n // r belong together, where r is the
number of signal heads per noise head. lambda_q1, lambda_k1, lambda_q2 and lambda_k2 are trained
vectors [d] of the layer. By default lambda_init is 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l, counted
from 1.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from pydantic import Field
from typing_extensions import override

from diffmegatron.attention.kernels.registry import Operation
from diffmegatron.section import FREE

from .kind import AttentionKind
from .lambda_init import LambdaInit
from .layer import (
    HEAD_NORM,
    Constant,
    Context,
    FusedHead,
    Heads,
    Layer,
    Parameter,
    Rows,
    numbered,
)
from .output_gate import OutputGate, with_gate
from .qk_norm import QKNorm

if TYPE_CHECKING:
    from torch import Tensor

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class TwoMaps(AttentionKind):
    """Layout of ``num_heads`` differential heads with two maps and an output of width 2d.

    Each of the ``num_kv_heads`` key-value heads has two keys of width d and a value of width 2d.
    """

    @property
    def heads(self) -> Heads:
        """Layout of the heads in ``linear_qkv``: one block per key-value head.

        A block begins with the query heads of the first map, their key, and the first half of the
        value. The noise heads, their key, and the second half of the value follow.
        """
        counts = (self.num_heads, self.num_heads // self.ratio)
        signal, noise = (count // self.num_kv_heads for count in counts)
        rows: Rows = (("q", signal), ("k", 1), ("v", 1), ("q", noise), ("k", 1), ("v", 1))
        return Heads(self.head_dim, self.num_kv_heads, rows, 2 * signal)

    @property
    @override
    def matrices(self) -> tuple[FusedHead, ...]:
        """Matrices q1, k1, q2, k2 and v, and g with a gate.

        The heads of v and g are 2 d wide.
        """
        rows = self.heads.rows
        maps = ("1",) * (len(rows) // 2) + ("2",) * (len(rows) // 2)
        names = (
            name if name in ("v", "g") else name + of
            for (name, count), of in zip(rows, maps, strict=True)
            for _ in range(count)
        )
        return tuple(
            FusedHead(name, head // 2 if name in ("v", "g") else head)
            for name, head in numbered(names)
        )


def split_maps(
    query: "Tensor", key: "Tensor", value: "Tensor", ratio: int = 1
) -> tuple["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"]:
    """Return q1, k1, q2, k2 and v from the heads of this rank in the layout of `TwoMaps`.

    q1 is [b, s, h, d], q2 is [b, s, h / r, d], k1 and k2 are [b, s, h_kv, d], and v is
    [b, s, h_kv, 2d]. On this rank, h is the number of signal heads, and h_kv the number of
    key-value heads. r is ``ratio``.
    """
    blocks = key.shape[2] // 2
    noise = query.shape[2] // blocks // (ratio + 1)
    signal = ratio * noise
    if blocks == 1 or signal == 1:
        q1, q2 = query.unflatten(2, (blocks, -1)).split([signal, noise], dim=3)
        q1, q2 = q1.flatten(2, 3), q2.flatten(2, 3)
    else:
        from .split_queries import split_queries

        q1, q2 = split_queries(query, blocks, signal)
    k1, k2 = key.unflatten(2, (blocks, 2)).unbind(3)
    v = value.unflatten(2, (blocks, 2)).flatten(3)
    return q1, k1, q2, k2, v


class VectorLambda(QKNorm, OutputGate, TwoMaps):
    """Two maps with one lambda per layer, computed from four trained vectors.

    ``lambda_std`` is the standard deviation of the initial lambda vectors; its default is from the
    code of DIFF V1's authors. ``headwise_norm`` applies an RMSNorm to each head's output. All heads
    share the norm's weight [2d].
    """

    lambda_init: LambdaInit = LambdaInit()
    lambda_std: Annotated[float, FREE] = Field(
        default=0.1, ge=0, description="standard deviation of the initial lambda vectors"
    )
    headwise_norm: bool = Field(default=True, description="RMSNorm of each head's output")

    operation: ClassVar[Operation] = "differential"

    @property
    @override
    def heads(self) -> Heads:
        return with_gate(self, super().heads)

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the lambda vectors, the gate and the norms' weights, if configured."""
        # Rounding the vectors to bf16 would change lambda by 1e-3 to 5e-3.
        vectors = [
            Parameter(name, (self.head_dim,), self.lambda_std, "lambda", float32=True)
            for name in LAMBDA_VECTORS
        ]
        norm = Parameter(HEAD_NORM, (2 * self.head_dim,), Constant(1.0), "norm", float32=True)
        own = (*super().parameters(hidden_size), *vectors)
        return (*own, norm) if self.headwise_norm else own

    @override
    def current_lambda(self, layer: Layer) -> "Tensor":
        (lambda_,) = self.current_lambdas([(self, layer)])
        return lambda_

    @classmethod
    @override
    def current_lambdas(cls, layers: Sequence[tuple[Self, Layer]]) -> "Sequence[Tensor]":
        import torch

        names = [(layer, name) for name in LAMBDA_VECTORS for _, layer in layers]
        vectors = torch.stack([layer.parameter(name) for layer, name in names])
        learned = learned_lambda(vectors.unflatten(0, (len(LAMBDA_VECTORS), -1)))
        initial = [kind.lambda_init.of_layer(layer.layer_number) for kind, layer in layers]
        return torch._foreach_add(learned.unbind(), initial)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        """Return (1 - lambda_init) RMSNorm(DiffAttn(X)), [b, s, heads of this rank, 2d].

        Without ``headwise_norm``, return DiffAttn(X).
        """
        from diffmegatron.attention.kernels.api import HeadwiseNorm

        maps = split_maps(query, key, value, self.ratio)
        lambda_ = self.current_lambda(layer) if context.lambda_ is None else context.lambda_
        norm = None
        if self.headwise_norm:
            scale = 1.0 - self.lambda_init.of_layer(layer.layer_number)
            norm = HeadwiseNorm(layer.parameter(HEAD_NORM), layer.norm_eps, scale)
        return context.diff_attention(*maps, lambda_=lambda_, norm=norm)


def learned_lambda(vectors: "Iterable[Tensor]") -> "Tensor":
    """Return exp(q1 . k1) - exp(q2 . k2) of the vectors q1, k1, q2 and k2, each [..., d]: [...]."""
    q1, k1, q2, k2 = vectors
    return (q1 * k1).sum(-1).exp() - (q2 * k2).sum(-1).exp()
