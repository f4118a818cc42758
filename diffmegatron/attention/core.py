"""The core-attention modules that Megatron's SelfAttention hosts.

Megatron projects, rotates and shards; these modules turn its q, k, v into the layer's head
outputs. The heads arrive as Megatron groups them, for a differential model with h heads of
query/key width d and h_kv key-value heads:

    query groups 2j and 2j + 1 belong to differential key-value head j: the first holds the keys
    (and queries) of map 1, the second those of map 2, and their two d-wide values side by side
    are the head's 2d-wide value. Differential head n = j r + i (r = h / h_kv) has q1 = query i of
    group 2j and q2 = query i of group 2j + 1.

So q is (h_kv, 2, r, d) along its heads, k and v are (h_kv, 2, d), and the output, h heads of 2d,
is as wide as the 2h heads of d that ``linear_proj`` expects.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from diffmegatron.attention.context.gather import gathered_attention
from diffmegatron.attention.context.ring import Ring, ring_attention
from diffmegatron.attention.context.ulysses import ulysses_attention
from diffmegatron.attention.kernels import (
    HeadwiseNorm,
    Maps,
    diff_attention,
    softmax_attention,
)
from diffmegatron.attention.lambdas import differential_lambda, lambda_init
from diffmegatron.config.schema import ModelConfig

ContextExchange = Literal["ring", "all_gather", "ulysses"]

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class HeadNorm(torch.nn.Module):
    """The weight [channels] float32 of the RMSNorm over each head on its own.

    As the reference code's ``subln``: one weight for all heads. The kernels apply it, fused where
    they can, in float32 arithmetic whatever the input's dtype.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(channels, dtype=torch.float32))


class _CoreAttention(MegatronModule):
    """What both twins share: Megatron's calling convention, the norm, context parallelism."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        model: ModelConfig,
        backend: str,
        exchange: ContextExchange = "ring",
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.causal = attn_mask_type == AttnMaskType.causal
        self.softmax_scale = softmax_scale
        self.backend = backend
        self.exchange = exchange
        self.tensor_group = pg_collection.tp if pg_collection is not None else None
        self.context_group = pg_collection.cp if pg_collection is not None else None
        self.norm = HeadNorm(model.head_norm_dim) if model.has_headwise_norm else None
        self.norm_eps = model.norm_eps
        self.norm_scale = 1.0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Head outputs of this rank's heads at its positions.

        Args:
            query: [s, b, 2h, d]; key, value: [s, b, 2 h_kv, d], heads as the module says.
            attention_mask: None, or the ends of packed documents: [documents + 1] integers on the
                CPU, in the batch's whole rows laid end to end; attention then stays within one.
                (Megatron hands this argument through to every layer as it is.)

        Returns:
            [s, b, 2h d], in ``query``'s dtype.
        """
        documents, group = attention_mask, self.context_group
        if group is None or group.size() == 1:
            return self._attend(query, key, value, documents)
        if self.exchange == "ulysses":
            return ulysses_attention(
                query, key, value, group, lambda q, k, v: self._attend(q, k, v, documents)
            )
        exchange = self._ring if self.exchange == "ring" else self._gathered
        if documents is None:
            return exchange(query, key, value, None)
        # Each row has its own documents, and its positions begin at 0.
        bounds = row_boundaries(documents, query.shape[1])
        rows = zip(*(x.split(1, dim=1) for x in (query, key, value)), bounds, strict=True)
        return torch.cat([exchange(q, k, v, ends) for q, k, v, ends in rows], dim=1)

    def _gathered(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> Tensor:
        assert self.context_group is not None

        def attend(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
            offset = number * query.shape[0]
            return self._attend(query, key, value, documents, offset)

        return gathered_attention(query, key, value, self.context_group, attend)

    def _ring(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None) -> Tensor:
        assert self.context_group is not None
        ring = Ring(
            self.context_group, self._maps_of_parts, self.softmax_scale, self.backend, documents
        )
        heads = ring_attention(query, key, value, self.current_lambda(), ring)
        norm = self._headwise_norm()
        return self._merge_heads(heads if norm is None else norm.apply_to(heads), query)

    @abstractmethod
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        query_offset: int | None = None,
    ) -> Tensor:
        """Heads of queries that end where the keys end; documents with an offset are of one row."""

    @abstractmethod
    def _maps(self, query: Tensor, key: Tensor, value: Tensor) -> Maps:
        """The twin's softmax maps, from rows [b, s, heads, d]."""

    @abstractmethod
    def current_lambda(self) -> Tensor | None:
        """lambda of this layer, a 0-dim float32 tensor; None where there is one map."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        """Keep this module's parameters in float32 when the model around it is cast to bf16.

        Rounding the lambda vectors to bf16 moves lambda by 1e-3 to 5e-3.
        """

        def keep_float32(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

        return super()._apply(keep_float32, recurse)

    def _maps_of_parts(self, query: Tensor, key: Tensor, value: Tensor) -> Maps:
        return self._maps(*(x.transpose(0, 1) for x in (query, key, value)))

    @staticmethod
    def _rows(heads: Tensor, documents: Tensor | None) -> Tensor:
        """[s, b, heads, d] as [b, s, heads, d], or with documents as one row [1, b s, heads, d]."""
        rows = heads.transpose(0, 1)
        return rows if documents is None else rows.flatten(0, 1)[None]

    @staticmethod
    def _merge_heads(heads: Tensor, query: Tensor) -> Tensor:
        """The kernels' rows as Megatron's [s, b, heads d], in ``query``'s dtype."""
        length, batch = query.shape[:2]
        return heads.to(query.dtype).reshape(batch, length, -1).transpose(0, 1).contiguous()

    def _replicated(self, parameter: Tensor) -> Tensor:
        """A parameter every tensor-parallel rank holds whole.

        Each rank sees only its own heads' share of the gradient; Megatron's region sums it over
        the ranks, with and without sequence parallelism (the ``sequence_parallel`` attribute
        would sum only with). Under ZeRO 3 in bf16 the parameter is a rounded one, and its exact
        value comes with it (:mod:`diffmegatron.optim.exact`).
        """
        exact = getattr(parameter, "exact", None)
        if exact is not None:
            parameter = exact + (parameter - parameter.detach())
        return copy_to_tensor_model_parallel_region(parameter, group=self.tensor_group)

    def _headwise_norm(self) -> HeadwiseNorm | None:
        if self.norm is None:
            return None
        return HeadwiseNorm(self._replicated(self.norm.weight), self.norm_eps, self.norm_scale)


class DifferentialCoreAttention(_CoreAttention):
    """(softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V per head, then the norm.

    Ye et al., ICLR 2025, equations 1 to 3; the norm's output is scaled by 1 - lambda_init.
    """

    def __init__(self, *args: object, model: ModelConfig, **kwargs: object) -> None:
        super().__init__(*args, model=model, **kwargs)  # type: ignore[arg-type]
        self.lambda_init = lambda_init(model.lambda_init, self.layer_number)
        self.norm_scale = 1.0 - self.lambda_init
        for name in LAMBDA_VECTORS:
            vector = torch.nn.Parameter(torch.zeros(model.head_dim, dtype=torch.float32))
            self.register_parameter(name, vector)

    def current_lambda(self) -> Tensor:
        """lambda of this layer, a 0-dim float32 tensor."""
        q1, k1, q2, k2 = (self._replicated(getattr(self, name)) for name in LAMBDA_VECTORS)
        return differential_lambda(q1, k1, q2, k2, self.lambda_init)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        query_offset: int | None = None,
    ) -> Tensor:
        rows = (self._rows(x, documents) for x in (query, key, value))
        (q1, q2), (k1, k2), v = self._maps(*rows)
        heads = diff_attention(
            q1,
            k1,
            q2,
            k2,
            v,
            self.current_lambda(),
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            backend=self.backend,
            cu_seqlens=documents,
            query_offset=query_offset,
            norm=self._headwise_norm(),
        )
        return self._merge_heads(heads, query)

    def _maps(self, query: Tensor, key: Tensor, value: Tensor) -> Maps:
        # (h_kv, 2, r, d) -> two of (h, d); (h_kv, 2, d) -> two of (h_kv, d), or one of (h_kv, 2d)
        kv_heads = key.shape[2] // 2
        q1, q2 = query.unflatten(2, (kv_heads, 2, -1)).unbind(3)
        k1, k2 = key.unflatten(2, (kv_heads, 2)).unbind(3)
        v = value.unflatten(2, (kv_heads, 2)).flatten(3)
        return Maps((q1.flatten(2, 3), q2.flatten(2, 3)), (k1, k2), v)


class SoftmaxCoreAttention(_CoreAttention):
    """softmax(Q K^T / sqrt(d)) V per head: the Transformer of the pair, through the same calls.

    The recipe's backend is one of differential attention; this one's map is computed by torch's
    attention, but for a ring's chunks of packed documents, for which torch has no kernel.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.backend = "auto"

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Tensor | None,
        query_offset: int | None = None,
    ) -> Tensor:
        heads = softmax_attention(
            *(self._rows(x, documents) for x in (query, key, value)),
            causal=self.causal,
            softmax_scale=self.softmax_scale,
            cu_seqlens=documents,
            query_offset=query_offset,
        )
        norm = self._headwise_norm()
        return self._merge_heads(heads if norm is None else norm.apply_to(heads), query)

    def current_lambda(self) -> None:
        """None: one map."""

    def _maps(self, query: Tensor, key: Tensor, value: Tensor) -> Maps:
        return Maps((query,), (key,), value)


def row_boundaries(documents: Tensor, rows: int) -> list[Tensor]:
    """The ends of documents of each row on its own, from those of the rows laid end to end.

    Args:
        documents: [documents + 1] integers from 0 to rows x length; each row ends one.
        rows: how many rows there are.

    Returns:
        One tensor of integers from 0 to length per row.
    """
    length = int(documents[-1]) // rows
    return [
        documents[(documents >= row * length) & (documents <= (row + 1) * length)] - row * length
        for row in range(rows)
    ]
