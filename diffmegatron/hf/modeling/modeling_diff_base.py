# SPDX-License-Identifier: Apache-2.0
"""Base classes of a Llama with another attention, with or without sliding windows.

The decoder is Qwen2's, which is Llama's with a mask for each type of layer in ``layer_types``.
"""

from collections.abc import Callable

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model


def new_head_norm(config: PretrainedConfig) -> nn.Module:
    """Return the RMSNorm of queries or keys [..., head_dim]; the identity without ``qk_norm``."""
    if config.qk_norm:
        return LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
    return nn.Identity()


def new_output_gate(config: PretrainedConfig, num_heads: int, width: int) -> nn.Module | None:
    """Return the projection to a gate's logits; None without ``output_gate``.

    There is a logit for each of ``num_heads`` heads, or for each of the ``width`` channels of each.
    """
    if config.output_gate is None:
        return None
    logits = num_heads * (width if config.output_gate == "elementwise" else 1)
    return nn.Linear(config.hidden_size, logits, bias=False)


def gated(heads: Tensor, gate: nn.Module | None, hidden_states: Tensor) -> Tensor:
    """Return ``heads``, [b, s, channels], times the sigmoid of the gate's logits.

    ``hidden_states`` is the normalized input of the attention, [b, s, hidden]. The logits are
    [b, s, heads] or [b, s, channels]. Without a gate, return ``heads``.
    """
    if gate is None:
        return heads
    factors = gate(hidden_states).sigmoid().unsqueeze(-1)
    return (heads.unflatten(-1, (factors.shape[-2], -1)) * factors).flatten(-2)


def window_of(config: PretrainedConfig, layer_idx: int) -> int | None:
    """Return the number of keys that a query of a layer sees, its own included; None: all."""
    is_sliding = config.layer_types[layer_idx] == "sliding_attention"
    return config.sliding_window if is_sliding else None


class DiffBaseModel(Qwen2Model):
    """Llama's decoder with the attention that a subclass sets as ``new_attention``."""

    new_attention: Callable[[PretrainedConfig, int], nn.Module]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        for layer_idx, layer in enumerate(self.layers):
            layer.self_attn = self.new_attention(config, layer_idx)
        self.post_init()


class DiffBaseForCausalLM(Qwen2ForCausalLM):
    """A decoder of class ``decoder`` with the projection of its outputs to the vocabulary."""

    decoder: type[DiffBaseModel]

    def __init__(self, config: PretrainedConfig) -> None:
        # Qwen2ForCausalLM's constructor would also build a complete Qwen2Model, so skip it.
        PreTrainedModel.__init__(self, config)
        self.model = self.decoder(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
