# SPDX-License-Identifier: Apache-2.0
"""A Llama with grouped differential attention (Motif, arXiv 2510.06949).

There are h signal heads; each group of r signal heads shares a noise head. With r = 1, this is the
Differential Transformer (arXiv 2410.05258). A1 are the softmax maps of the signal heads, and A2 the
softmax maps of the noise heads. For signal head n (from 0), whose key-value head has the value v:

    out_n = (A1_n - lambda * A2_(n // r)) v
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    head_n = (1 - lambda_init) * RMSNorm(out_n), over the 2d channels of out_n

All head_n together are the input of ``o_proj``. If ``headwise_norm`` is False, head_n is out_n.
With ``output_gate``, the input of ``o_proj`` is head_n * sigmoid(x W_gate): W_gate has a column for
each head, or for each channel of each head. x is the normalized input of the layer.
There are h_kv differential key-value heads. Each has two keys, k1 for its signal heads and k2 for
their noise heads. Order of the heads, with d = ``head_dim``:

    q_proj    rows: h signal heads of d rows each, then h / r noise heads of d rows each
    k_proj    rows: k1 of all key-value heads, d rows each, then k2 of all of them
    v_proj    rows: h_kv values of 2d rows each
    o_proj    columns: h heads of 2d columns each

**Motif-2's checkpoints** have h = 32, r = 4 and h_kv = 8, with queries and keys in another order.
In ``q_proj``, block 5 * m + i of d rows is signal head 4 * m + i for i < 4, and noise head m for
i = 4. In ``k_proj``, block 2 * j + i of d rows is k1 (i = 0) or k2 (i = 1) of key-value head j.
Values and output have the order above. The MLP has another activation, PolyNorm.

**One call.** A serving engine has one attention call per layer, one cache for it, and keys as wide
as values. Therefore one grouped-query attention of width d computes both maps and both halves of
the values. Its 4 h query heads and 4 h_kv key-value heads are, in this order:

    query heads            key-value heads: key, value
    signal heads           k1, first d channels of the value
    signal heads           k1, last d channels
    noise heads, r times   k2, first d channels
    noise heads, r times   k2, last d channels

In shapes, b is the batch size, s the number of queries and t the number of keys.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2PreTrainedModel

from .configuration_grouped_diff import GroupedDiffConfig
from .modeling_diff_base import (
    DiffBaseForCausalLM,
    DiffBaseModel,
    gated,
    new_head_norm,
    new_output_gate,
    window_of,
)

try:
    # transformers 5 calls _init_weights for loaded weights too. The functions of `initialization`
    # leave loaded weights unchanged. transformers 4 initializes only new weights.
    from transformers import initialization
except ImportError:
    from torch.nn import init as initialization

# Parameters with one of these parts in their dotted name stay float32 in a model of any dtype.
FLOAT32 = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "subln")


class GroupedDiffAttention(LlamaAttention):
    """Grouped differential attention; the beginning of this file has the order of its heads."""

    def __init__(self, config: GroupedDiffConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = window_of(config, layer_idx)
        h, h_kv, d = config.num_signal_heads, config.num_differential_kv_heads, self.head_dim
        hidden, noise_heads = config.hidden_size, config.num_noise_heads
        self.num_signal_heads, self.num_noise_heads = h, noise_heads
        self.signal_per_noise = config.signal_per_noise
        # All query heads with different maps among those of the attention call.
        self.map_heads = [*range(h), *range(2 * h, 3 * h, config.signal_per_noise)]
        self.q_proj = nn.Linear(hidden, (h + noise_heads) * d, bias=False)
        self.k_proj = nn.Linear(hidden, 2 * h_kv * d, bias=False)
        self.v_proj = nn.Linear(hidden, 2 * h_kv * d, bias=False)
        self.o_proj = nn.Linear(2 * h * d, hidden, bias=False)
        self.q_norm, self.k_norm = new_head_norm(config), new_head_norm(config)
        self.output_gate = new_output_gate(config, h, 2 * d)
        self.lambda_init = config.layer_lambda_init(layer_idx)
        # float32 also in a bf16 model, because rounding would change lambda by up to 5e-3.
        self.lambda_q1 = nn.Parameter(torch.zeros(d, dtype=torch.float32))
        self.lambda_k1 = nn.Parameter(torch.zeros(d, dtype=torch.float32))
        self.lambda_q2 = nn.Parameter(torch.zeros(d, dtype=torch.float32))
        self.lambda_k2 = nn.Parameter(torch.zeros(d, dtype=torch.float32))
        self.subln = LlamaRMSNorm(2 * d, config.rms_norm_eps) if config.headwise_norm else None

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [b, s, hidden], and the softmax maps of all query heads or None.

        The maps of signal heads precede the maps of noise heads.

        Args:
            position_embeddings: cosines and sines of RoPE, [b, s, d] each.
            past_key_values: cache with keys [b, 2 * h_kv, t, d] (all k1 and then all k2) and values
                of the same shape (the first d channels of all values, and then the last d
                channels). A serving engine instead caches the 4 * h_kv heads of the attention call.
        """
        batch, length = hidden_states.shape[:2]
        heads = (batch, length, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(batch, length, -1, 2, self.head_dim)
        value = value.permute(0, 3, 2, 1, 4).flatten(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            # The static cache of transformers 5.0 reads positions from the last argument.
            key, value = past_key_values.update(key, value, self.layer_idx, kwargs)

        signal, noise = query.split((self.num_signal_heads, self.num_noise_heads), dim=1)
        noise = noise.repeat_interleave(self.signal_per_noise, dim=1)
        query = torch.cat((signal, signal, noise, noise), dim=1)
        key_1, key_2 = key.chunk(2, dim=1)
        key = torch.cat((key_1, key_1, key_2, key_2), dim=1)
        value = torch.cat((value, value), dim=1)
        # vLLM reads this source: `forward` itself must look the function up and call it once, with
        # an attribute as `scaling`.
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        attended, weights = attend(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        output = self._combine(attended.reshape(heads)).to(hidden_states.dtype)
        maps = None if weights is None else weights[:, self.map_heads]
        return self.o_proj(gated(output.flatten(-2), self.output_gate, hidden_states)), maps

    def _combine(self, attended: Tensor) -> Tensor:
        """Return head_n of all signal heads (see the beginning of this file), [b, s, h, 2d].

        ``attended`` has the outputs of the attention call, [b, s, 4h, d]. The result is at least
        float32.
        """
        wide = torch.promote_types(attended.dtype, torch.float32)
        first = torch.sum(self.lambda_q1.to(wide) * self.lambda_k1.to(wide))
        second = torch.sum(self.lambda_q2.to(wide) * self.lambda_k2.to(wide))
        lambda_ = torch.exp(first) - torch.exp(second) + self.lambda_init
        signal, noise = attended.to(wide).unflatten(-2, (2, 2, -1)).transpose(-3, -2).unbind(-4)
        heads = (signal - lambda_ * noise).flatten(-2)
        if self.subln is not None:
            heads = (1 - self.lambda_init) * self.subln(heads)
        return heads


class GroupedDiffPreTrainedModel(Qwen2PreTrainedModel):
    """Base class of the models of this file."""

    config_class = GroupedDiffConfig
    _can_record_outputs: ClassVar = {
        "hidden_states": Qwen2DecoderLayer,
        "attentions": GroupedDiffAttention,
    }

    def post_init(self) -> None:
        """Keep the lambda vectors and the headwise norm in float32, then call Llama's method."""
        # transformers 4 refuses names without a parameter, and Llama's constructor calls this
        # method before all parameters exist. Therefore list only names that exist.
        parts = {part for name, _ in self.named_parameters() for part in name.split(".")}
        self._keep_in_fp32_modules_strict = [name for name in FLOAT32 if name in parts]
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, GroupedDiffAttention):
            for vector in (module.lambda_q1, module.lambda_k1, module.lambda_q2, module.lambda_k2):
                initialization.normal_(vector, mean=0.0, std=self.config.lambda_std_dev)


class GroupedDiffModel(GroupedDiffPreTrainedModel, DiffBaseModel):
    """Llama's decoder with grouped differential attention in every layer."""

    new_attention = GroupedDiffAttention


class GroupedDiffForCausalLM(GroupedDiffPreTrainedModel, DiffBaseForCausalLM):
    """``GroupedDiffModel`` with the projection of its outputs to the vocabulary."""

    decoder = GroupedDiffModel
