# SPDX-License-Identifier: Apache-2.0
"""A Llama whose attention has a gate before the output projection, as in Qwen3-Next.

For the normalized input x of a layer at a token, and the attention output A_n of head n:

    out_n = sigmoid(x W_gate)_n * A_n

W_gate is ``output_gate``. It has a column for each head (``headwise``), or for each of the
``head_dim`` channels of each head (``elementwise``). All out_n together are the input of
``o_proj``. In shapes, b is the batch size and s the number of positions.
"""

from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2PreTrainedModel

from .configuration_gated_llama import GatedLlamaConfig
from .modeling_diff_base import (
    DiffBaseForCausalLM,
    DiffBaseModel,
    gated,
    new_head_norm,
    new_output_gate,
    window_of,
)


class GatedLlamaAttention(LlamaAttention):
    """Llama's attention with the gate over the normalized input of a layer."""

    def __init__(self, config: GatedLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = window_of(config, layer_idx)
        self.q_norm, self.k_norm = new_head_norm(config), new_head_norm(config)
        self.output_gate = new_output_gate(config, config.num_attention_heads, self.head_dim)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output [b, s, hidden], and the softmax maps of all heads or None.

        ``position_embeddings`` are cosines and sines of RoPE, [b, s, head_dim] each.
        """
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
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
        output = gated(attended.reshape(heads).flatten(-2), self.output_gate, hidden_states)
        return self.o_proj(output), weights


class GatedLlamaPreTrainedModel(Qwen2PreTrainedModel):
    """Base class of the models of this file."""

    config_class = GatedLlamaConfig
    _can_record_outputs: ClassVar = {
        "hidden_states": Qwen2DecoderLayer,
        "attentions": GatedLlamaAttention,
    }


class GatedLlamaModel(GatedLlamaPreTrainedModel, DiffBaseModel):
    """Llama's decoder with a gate in every layer."""

    new_attention = GatedLlamaAttention


class GatedLlamaForCausalLM(GatedLlamaPreTrainedModel, DiffBaseForCausalLM):
    """``GatedLlamaModel`` with the projection of its outputs to the vocabulary."""

    decoder = GatedLlamaModel
