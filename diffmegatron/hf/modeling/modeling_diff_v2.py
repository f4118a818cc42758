# SPDX-License-Identifier: Apache-2.0
"""A Llama whose attention is DIFF V2 (Microsoft, 2026).

There are h signal heads, and each group of r signal heads shares a noise head. Microsoft's DIFF V2
has r = 1; Motif-3 uses r > 1. For the hidden state x of a token, and signal head n with its noise
head m = n // r:

    out_n = signal_n(x) - sigmoid(x W_lambda)_n * noise_m(x)

W_lambda is ``lambda_proj``. signal_n and noise_m are the attention outputs of the two heads for
this token. With ``output_gate``, sigmoid(x W_gate) multiplies out_n: W_gate has a column for each
head, or for each channel of each head. All h + h / r heads are the query heads of one grouped-query
attention with an ordinary key-value cache. In shapes, b is the batch size and s the number of
positions.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2PreTrainedModel

from .configuration_diff_v2 import DiffV2Config
from .modeling_diff_base import (
    DiffBaseForCausalLM,
    DiffBaseModel,
    gated,
    new_head_norm,
    new_output_gate,
    window_of,
)


class DiffV2Attention(LlamaAttention):
    """DIFF V2 attention over the normalized input of a layer.

    The rows of ``q_proj`` are in h / r groups: r signal heads and then their noise head, each with
    ``head_dim`` rows. Consecutive groups share a key-value head. For each signal head, in the
    same order, ``lambda_proj`` has one row and ``o_proj`` has ``head_dim`` columns.
    """

    def __init__(self, config: DiffV2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = window_of(config, layer_idx)
        self.signal_per_noise = config.signal_per_noise
        hidden, signals = config.hidden_size, config.num_signal_heads
        self.lambda_proj = nn.Linear(hidden, signals, bias=False)
        self.o_proj = nn.Linear(signals * self.head_dim, hidden, bias=False)
        self.q_norm, self.k_norm = new_head_norm(config), new_head_norm(config)
        self.output_gate = new_output_gate(config, signals, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [b, s, hidden], and the softmax maps of all query heads or None.

        ``position_embeddings`` are cosines and sines of RoPE, [b, s, head_dim] each.
        """
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            # The static cache of transformers 5.0 reads positions from the last argument.
            key, value = past_key_values.update(key, value, self.layer_idx, kwargs)

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
        output = self._combine(attended.reshape(heads), self.lambda_proj(hidden_states))
        output = gated(output.to(hidden_states.dtype), self.output_gate, hidden_states)
        return self.o_proj(output), weights

    def _combine(self, attended: Tensor, logits: Tensor) -> Tensor:
        """Return signal - sigmoid(logits) * noise of all h signal heads, [b, s, h * head_dim].

        ``attended`` has all query heads, [b, s, h + h / r, head_dim]. ``logits`` is the output of
        ``lambda_proj``, [b, s, h]. The result is at least float32.
        """
        wide = torch.promote_types(attended.dtype, torch.float32)
        groups = attended.to(wide).unflatten(-2, (-1, self.signal_per_noise + 1))
        signal, noise = groups.split((self.signal_per_noise, 1), dim=-2)
        lambda_ = logits.to(wide).sigmoid().unflatten(-1, (-1, self.signal_per_noise))
        return (signal - lambda_.unsqueeze(-1) * noise).flatten(-3)


class DiffV2PreTrainedModel(Qwen2PreTrainedModel):
    """Base class of the models of this file."""

    config_class = DiffV2Config
    _can_record_outputs: ClassVar = {
        "hidden_states": Qwen2DecoderLayer,
        "attentions": DiffV2Attention,
    }


class DiffV2Model(DiffV2PreTrainedModel, DiffBaseModel):
    """Llama's decoder with DIFF V2 in every layer."""

    new_attention = DiffV2Attention


class DiffV2ForCausalLM(DiffV2PreTrainedModel, DiffBaseForCausalLM):
    """``DiffV2Model`` with the projection of its outputs to the vocabulary."""

    decoder = DiffV2Model
