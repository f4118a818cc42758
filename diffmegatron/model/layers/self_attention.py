"""Self-attention in Megatron-core's layers: projections, rotary embedding, core attention.

A *kind* is a class of attention. Megatron's own ``SelfAttention`` does not support kinds that
compute with the hidden states, or that have more query heads than output heads. This layer does not
support decoding with a key-value cache.

In shapes s is the number of positions on this context-parallel rank, b the number of sequences, and
d the width of a query.
"""

from collections.abc import Callable
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

from diffmegatron.attention.context_parallel.whole_sequence import WholeSequence
from diffmegatron.attention.kernels.registry import ContextCommunication
from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.attention.kinds.layer import (
    OUTPUT_GATE,
    QK_NORMS,
    QKV_BIAS,
    Constant,
    Identity,
    Parameter,
)
from diffmegatron.model.layers.rotary import rotate

# A function with three arguments: the rotated queries and the rotated keys of this rank, each
# [s, b, heads, d], and the boundaries of packed documents (None without packing).
Observer = Callable[[Tensor, Tensor, Tensor | None], None]


class SelfAttention(MegatronModule):
    """Self-attention of one transformer layer, computed by its kind.

    Attributes:
        kind: kind of attention and its sizes.
        layer_number: number of the layer, counted from 1 over all pipeline stages.
        step: number of completed optimizer steps.
        rotary_scale: number by which the rotation multiplies queries and keys.
        lambda_: 0-dim lambda of this layer in the present forward pass, if the network has computed
            the lambdas of several layers together; otherwise None.
        observer: function to call in each forward pass, or None.
        observed: functions that compute numbers of the last forward pass for the log (0-dim), by
            name.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        *,
        kind: AttentionKind,
        backend: str,
        communication: ContextCommunication,
        rotary_scale: float = 1.0,
        subtraction: str = "auto",
        linear_qkv: type | ModuleSpec,
        linear_proj: type | ModuleSpec,
    ) -> None:
        super().__init__(config=config)
        if config.rotary_interleaved:
            raise ValueError(
                "rotary_interleaved is True and heads are rotated in halves; it must be False"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.context_group = groups.tp, groups.cp
        self.kind, self.layer_number = kind, layer_number
        self.norm_eps, self.step = config.layernorm_epsilon, 0
        self.whole_sequence = WholeSequence(
            self.context_group, communication, kind.operation, backend, subtraction, kind.window
        )
        self.rotary_scale = rotary_scale
        self.lambda_: Tensor | None = None
        self.observer: Observer | None = None
        self.observed: dict[str, Callable[[], Tensor]] = {}
        heads = kind.heads
        common = {"config": config, "is_expert": False, "tp_group": self.tp_group}
        self._declared = {each.name: each for each in kind.parameters(config.hidden_size)}
        has_bias = self._declared.pop(QKV_BIAS, None) is not None
        self.linear_qkv = build_module(
            linear_qkv,
            config.hidden_size,
            heads.qkv_channels,
            init_method=config.init_method,
            bias=has_bias,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.linear_proj = build_module(
            linear_proj,
            heads.output_channels,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        for declared in self._declared.values():
            parameter = torch.nn.Parameter(self._initial(declared))
            # The gradient of an unsharded parameter covers only this rank's heads. The attribute
            # makes optim/reduction.py sum this gradient over the tensor-parallel ranks.
            parameter.has_partial_gradient = not declared.sharded  # type: ignore[attr-defined]
            if declared.sharded and config.perform_initialization:
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(declared.name, parameter)

    def _initial(self, declared: Parameter) -> Tensor:
        # Every tensor-parallel rank draws the whole parameter and keeps its own rows. All of these
        # ranks must have the same state of torch's CPU generator.
        rows, *others = declared.shape
        own = self.share(rows) if declared.sharded else range(rows)
        dtype = torch.float32 if declared.float32 else self.config.params_dtype
        if not self.config.perform_initialization:
            return torch.empty(len(own), *others, dtype=dtype)
        whole, initial = torch.empty(declared.shape), declared.initial
        if isinstance(initial, Constant):
            whole.fill_(initial.value)
        elif isinstance(initial, Identity):
            whole = initial.scale * torch.eye(*declared.shape)
        elif initial == "matrix":
            self.config.init_method(whole)
        else:
            whole.normal_(0.0, initial)
        return whole[own.start : own.stop].to(dtype).clone()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the causal self-attention, in the shape of ``hidden_states``, and None (no bias).

        Args:
            hidden_states: [s, b, hidden_size]; under sequence parallelism, this tensor-parallel
                rank's shard of s.
            attention_mask: not used.
            rotary_pos_emb: angles of the s positions, [s, 1, 1, d] in radians.
            packed_seq_params: ``cu_seqlens_q`` has the boundaries of packed documents,
                [documents + 1] integers on the CPU. A boundary is a position in the concatenation
                of the b unsharded sequences.
        """
        documents = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        query, key, value, gate = self._split(self.linear_qkv(hidden_states)[0])
        query, key = self._normalized(query, key)
        query, key = (
            x.flatten(2, -2) for x in rotate(query, key, rotary_pos_emb, self.rotary_scale)
        )
        from_hidden = self.kind.from_hidden(self, hidden_states)
        if self.observer is not None:
            self.observer(query, key, documents)
        context = self.whole_sequence.within(documents)
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        from_hidden = None if from_hidden is None else from_hidden.transpose(0, 1)
        if OUTPUT_GATE in self._declared:
            gate = self.project(OUTPUT_GATE, hidden_states)
        gate = None if gate is None else gate.transpose(0, 1)

        def forward(
            lambda_: Tensor | None,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            hidden: Tensor | None,
            gate: Tensor | None,
        ) -> Tensor:
            own = context._replace(lambda_=lambda_)
            heads = self.kind.forward(self, own, q, k, v, hidden)
            return heads if gate is None else _gated(heads, gate)

        inputs = (self.lambda_, query, key, value, from_hidden, gate)
        if self.training and self.config.recompute_granularity == "selective":
            heads = tensor_parallel.checkpoint(forward, False, *inputs)
        else:
            heads = forward(*inputs)
        heads = heads.to(query.dtype).transpose(0, 1).flatten(2).contiguous()
        return self.linear_proj(heads)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Split the output of ``linear_qkv``, [s, b, channels].

        Return queries [s, b, groups, queries per group, d], keys [s, b, groups, keys per group, d],
        values [s, b, value heads, d], and the logits of an elementwise gate [s, b, output channels]
        or None. ``kind.heads.group`` is the layout of a group.
        """
        heads = self.kind.heads
        counts = [count for _, count in heads.group]
        groups = mixed.unflatten(2, (-1, sum(counts), heads.head_dim))
        taken: dict[str, list[Tensor]] = {part: [] for part in heads.parts}
        for (kind, _), part in zip(heads.group, groups.split(counts, dim=3), strict=True):
            taken[kind].append(part)
        whole = {part: x[0] if len(x) == 1 else torch.cat(x, dim=3) for part, x in taken.items()}
        gate = whole["g"].flatten(2) if "g" in whole else None
        return whole["q"], whole["k"], whole["v"].flatten(2, 3), gate

    def _normalized(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the RMSNorms of queries and keys [..., d] whose weights the kind declares."""
        if not self._declared.keys() >= {*QK_NORMS}:
            return query, key
        pairs = zip((query, key), QK_NORMS, strict=True)
        query, key = (
            torch.nn.functional.rms_norm(x, x.shape[-1:], self.parameter(name), self.norm_eps)
            for x, name in pairs
        )
        return query, key

    def share(self, count: int) -> range:
        """Return the indices of this tensor-parallel rank's equal share of ``count`` items."""
        own = count // self.tp_group.size()
        first = self.tp_group.rank() * own
        return range(first, first + own)

    def parameter(self, name: str) -> Tensor:
        """Return a parameter that the kind of attention declares, or this rank's shard of it.

        ZeRO 3 stores every parameter of a bf16 run in bf16. A parameter declared with ``float32``
        then has its float32 value in the attribute ``exact`` (:mod:`diffmegatron.optim.partition`).
        The result has this float32 value, and passes its gradient on to the parameter.
        """
        parameter = getattr(self, name)
        exact = getattr(parameter, "exact", None)
        if exact is not None:
            return exact + (parameter - parameter.detach())
        return parameter

    def project(self, name: str, hidden: Tensor) -> Tensor:
        """Multiply ``hidden`` [s, b, hidden_size] by the matrix ``name``, [rows, hidden_size].

        The matrix is a declared parameter, sharded by rows, and the result is [s, b, rows of this
        rank]. Under sequence parallelism, ``hidden`` is this tensor-parallel rank's shard of s. The
        ranks gather the matrix, which is much smaller than the hidden states.
        """
        weight = getattr(self, name)
        size = self.tp_group.size()
        if size == 1:
            return torch.nn.functional.linear(hidden, weight)
        is_shared = self.config.sequence_parallel
        whole = gather_from_sequence_parallel_region(
            weight, tensor_parallel_output_grad=is_shared, group=self.tp_group
        )
        products = torch.nn.functional.linear(hidden, whole)
        if not is_shared:
            return scatter_to_tensor_model_parallel_region(products, group=self.tp_group)
        by_rank = products.unflatten(2, (size, -1)).permute(2, 0, 1, 3).contiguous()
        return all_to_all(self.tp_group, by_rank).flatten(0, 1)

    def observe(
        self, name: str, value: Tensor, function: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Store in ``observed[name]`` how to compute the mean of ``function(value)``, for the log.

        The mean is over all elements. Most steps have no log, and save its kernels.
        """
        self.observed[name] = partial(_mean, value.detach(), function)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return Megatron's sharded state, with the kind's sharded parameters as shards.

        Megatron's own method treats these parameters as replicated.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        sharded = {n: getattr(self, n) for n, each in self._declared.items() if each.sharded}
        return state | make_sharded_tensors_for_checkpoint(
            sharded,
            prefix,
            dict.fromkeys(sharded, 0),
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> torch.nn.Module:
        """Apply ``fn``, such as a cast to bf16, but keep the dtype of the declared parameters."""

        def moved_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(moved_only, recurse=False)


def _mean(value: Tensor, function: Callable[[Tensor], Tensor] | None) -> Tensor:
    value = value.float()
    return (value if function is None else function(value)).mean()


def _gated(heads: Tensor, gate: Tensor) -> Tensor:
    """Return outputs of heads, [b, s, ...], times the sigmoid of a gate's logits.

    The logits ``gate`` are [b, s, heads] or [b, s, output channels]. As in Qwen3-Next, the product
    is computed in their dtype.
    """
    by_logit = heads.to(gate.dtype).flatten(2).unflatten(2, (gate.shape[2], -1))
    return by_logit * gate.sigmoid().unsqueeze(3)
