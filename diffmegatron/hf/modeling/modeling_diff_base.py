# SPDX-License-Identifier: Apache-2.0
"""Base classes of a Llama with another attention."""

from collections.abc import Callable

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel, LlamaRMSNorm


def new_head_norm(config: PretrainedConfig) -> nn.Module:
    """Return the RMSNorm of queries or keys [..., head_dim]; the identity without ``qk_norm``."""
    if config.qk_norm:
        return LlamaRMSNorm(config.head_dim, config.rms_norm_eps)
    return nn.Identity()


class DiffBaseModel(LlamaModel):
    """Llama's decoder with the attention that a subclass sets as ``new_attention``."""

    new_attention: Callable[[PretrainedConfig, int], nn.Module]

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        for layer_idx, layer in enumerate(self.layers):
            layer.self_attn = self.new_attention(config, layer_idx)
        self.post_init()


class DiffBaseForCausalLM(LlamaForCausalLM):
    """A decoder of class ``decoder`` with the projection of its outputs to the vocabulary."""

    decoder: type[DiffBaseModel]

    def __init__(self, config: PretrainedConfig) -> None:
        # LlamaForCausalLM's constructor would also build a complete LlamaModel, so skip it.
        PreTrainedModel.__init__(self, config)
        self.model = self.decoder(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
