"""Self-attention in Megatron-core's layers: projections, rotary embedding, the variant's attention.

A variant is a kind of attention. Megatron's own ``SelfAttention`` does not fit variants that need
the hidden states in attention, or that have more query heads than output heads. In differential
attention, for example, the output of noise heads is subtracted from the output of other heads.
Decoding is not supported.
"""

from collections.abc import Callable
from dataclasses import dataclass
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

from diffmegatron.attention.context_parallel.whole_sequence import whole_sequence
from diffmegatron.attention.rotary import rotate
from diffmegatron.attention.variants.base import (
    QKV_BIAS,
    Constant,
    ContextCommunication,
    Identity,
    Parameter,
    Variant,
)

# Function of the rotated queries and keys of this rank, [s, b, heads, d], and of the boundaries of
# packed documents (None: no boundaries).
Observer = Callable[[Tensor, Tensor, Tensor | None], None]


@dataclass
class SelfAttentionSubmodules:
    """Classes or specs of the two projections."""

    linear_qkv: type | ModuleSpec
    linear_proj: type | ModuleSpec


class SelfAttention(MegatronModule):
    """Self-attention of one transformer layer, computed by a variant.

    The variant declares the parameters of the layer other than the two projections, and computes
    the attention from projected queries, keys and values.

    Attributes:
        variant: kind of attention and its sizes.
        layer_number: number of the layer from 1, over all pipeline stages.
        step: number of optimizer steps that produced the weights.
        observer: function to call in each forward pass, or None.
        observed: dict from name to 0-dim tensor, the last forward pass's numbers for the log.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        *,
        variant: Variant,
        backend: str,
        communication: ContextCommunication,
    ) -> None:
        super().__init__(config=config)
        if config.rotary_interleaved:
            raise ValueError(
                "rotary_interleaved is True and heads are rotated in halves; it must be False"
            )
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.tp_group, self.context_group = groups.tp, groups.cp
        self.variant, self.layer_number = variant, layer_number
        self.norm_eps, self.step = config.layernorm_epsilon, 0
        self.backend, self.communication = backend, communication
        self.observer: Observer | None = None
        self.observed: dict[str, Tensor] = {}
        heads, common = variant.heads, {"config": config, "is_expert": False}
        self._declared = {each.name: each for each in variant.parameters(config.hidden_size)}
        has_bias = self._declared.pop(QKV_BIAS, None) is not None
        self.linear_qkv = build_module(
            submodules.linear_qkv,
            config.hidden_size,
            heads.qkv_channels,
            init_method=config.init_method,
            bias=has_bias,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            tp_group=self.tp_group,
            **common,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            heads.output_channels,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            tp_group=self.tp_group,
            **common,
        )
        for declared in self._declared.values():
            parameter = torch.nn.Parameter(self._initial(declared))
            # Autograd's gradient of an unsharded parameter covers only the heads of this rank. The
            # attribute makes optim/tensor_sums.py sum the gradient over the tensor-parallel ranks.
            parameter.has_partial_gradient = not declared.sharded  # type: ignore[attr-defined]
            if declared.sharded and config.perform_initialization:
                set_tensor_model_parallel_attributes(parameter, True, 0, 1)
            self.register_parameter(declared.name, parameter)

    def _initial(self, declared: Parameter) -> Tensor:
        """Return the initial values of a declared parameter, or of this rank's shard of it.

        Every rank draws the random values of the unsharded parameter from torch's CPU generator.
        Megatron seeds this generator equally on all tensor-parallel ranks, so the ranks agree.
        """
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
        """Compute causal self-attention; Megatron's layer calls it like Megatron's SelfAttention.

        Args:
            hidden_states: [s, b, hidden]; under sequence parallelism, this rank's shard of s.
            attention_mask: not used, as in Megatron's flash backends.
            rotary_pos_emb: angles of this rank's positions, [s, 1, 1, d] in radians.
            packed_seq_params: ``cu_seqlens_q`` has the boundaries of packed documents,
                [documents + 1] integers on the CPU. The boundaries are positions in the
                concatenation of the batch's unsharded rows, but the tensors are not concatenated
                (``qkv_format`` is ``sbhd``). None: no boundaries.

        Returns:
            Output with the shape of hidden_states, and the bias, which is None.
        """
        documents = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        query, key, value = self._split(self.linear_qkv(hidden_states)[0])
        query, key = self.variant.normalize_qk(self, query, key)
        query, key = (x.flatten(2, -2) for x in rotate(query, key, rotary_pos_emb))
        gate = self.variant.gate(self, hidden_states)
        if self.observer is not None:
            self.observer(query, key, documents)
        context = whole_sequence(self.context_group, self.communication, self.backend, documents)
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        gate = None if gate is None else gate.transpose(0, 1)
        forward = partial(self.variant.forward, self, context)
        if self.training and self.config.recompute_granularity == "selective":
            heads = tensor_parallel.checkpoint(forward, False, query, key, value, gate)
        else:
            heads = forward(query, key, value, gate)
        heads = heads.to(query.dtype).transpose(0, 1).flatten(2).contiguous()
        return self.linear_proj(heads)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of ``linear_qkv``, [s, b, channels], into queries, keys and values.

        The channels consist of groups of heads, and :attr:`Heads.group` is the order of the q, k
        and v heads in each group. The result is copied for heads that are not adjacent in a group.

        Returns:
            q [s, b, groups, queries per group, d], k [s, b, groups, keys per group, d] and v
            [s, b, heads, d].
        """
        heads = self.variant.heads
        counts = [count for _, count in heads.group]
        groups = mixed.unflatten(2, (-1, sum(counts), heads.head_dim))
        taken: dict[str, list[Tensor]] = {"q": [], "k": [], "v": []}
        for (kind, _), part in zip(heads.group, groups.split(counts, dim=3), strict=True):
            taken[kind].append(part)
        query, key, value = (x[0] if len(x) == 1 else torch.cat(x, dim=3) for x in taken.values())
        return query, key, value.flatten(2, 3)

    def share(self, count: int) -> range:
        """Return this rank's range of ``count`` items divided among the tensor-parallel ranks."""
        own = count // self.tp_group.size()
        first = self.tp_group.rank() * own
        return range(first, first + own)

    def parameter(self, name: str) -> Tensor:
        """Return a declared parameter, or this rank's shard of it.

        With ZeRO 3 in bf16, a parameter declared as float32 is stored in bf16, and its attribute
        ``exact`` has the float32 value (:mod:`diffmegatron.optim.float32_parameters`). The method
        then returns the float32 value, and the gradient still reaches the parameter.
        """
        parameter = getattr(self, name)
        exact = getattr(parameter, "exact", None)
        if exact is not None:
            return exact + (parameter - parameter.detach())
        return parameter

    def project(self, name: str, hidden: Tensor) -> Tensor:
        """Multiply hidden states by a matrix that is sharded by rows.

        Every tensor-parallel rank gathers the whole matrix and multiplies its hidden states by it,
        so the ranks communicate only the matrix, the products and the gradients of both. A
        column-parallel layer would communicate hidden states or their gradients, which are hundreds
        of times larger, because the matrix has few rows.

        Args:
            name: name of the declared matrix [rows, hidden].
            hidden: [s, b, hidden]; under sequence parallelism, this rank's shard of s.

        Returns:
            [s, b, rows of this rank] for the whole s.
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

    def observe(self, name: str, value: Tensor) -> None:
        """Store the mean over all elements of ``value`` in ``observed[name]``, for the log."""
        self.observed[name] = value.detach().float().mean()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict:
        """Return Megatron's sharded state, corrected for the sharded parameters of the variant.

        Megatron's method treats all parameters that the module itself registers as replicated over
        the tensor-parallel ranks.
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
        """Apply ``fn``, but keep the dtype of the parameters that this module itself registers.

        ``fn`` may cast the model to bf16, but a variant may declare parameters that must stay in
        float32. The two projections are cast, because they are submodules.
        """

        def moved_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(moved_only, recurse=False)
