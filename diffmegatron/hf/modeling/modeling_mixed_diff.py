# SPDX-License-Identifier: Apache-2.0
"""A Llama in which each layer has one of three attentions: Llama's, grouped differential, DIFF V2.

This file imports only torch, transformers and files of its folder, because exported models contain
copies of these files.
"""

from typing import ClassVar

from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)

from .configuration_mixed_diff import MixedDiffConfig
from .modeling_diff_v2 import DiffV2Attention
from .modeling_grouped_diff import GroupedDiffAttention, GroupedDiffPreTrainedModel

ATTENTION = {
    "llama": LlamaAttention,
    "grouped_diff": GroupedDiffAttention,
    "diff_v2": DiffV2Attention,
}


class MixedDiffPreTrainedModel(GroupedDiffPreTrainedModel):
    """Base class of the models of this file."""

    config_class = MixedDiffConfig  # type: ignore[assignment]
    _can_record_outputs: ClassVar = {
        "hidden_states": LlamaDecoderLayer,
        "attentions": LlamaAttention,
    }


class MixedDiffModel(MixedDiffPreTrainedModel, LlamaModel):
    """Llama's decoder, in which each layer has the kind of attention from the configuration."""

    def __init__(self, config: MixedDiffConfig) -> None:
        super().__init__(config)
        for layer_idx, layer in enumerate(self.layers):
            layer.self_attn = _attention(config, layer_idx)
        self.post_init()


def _attention(config: MixedDiffConfig, layer_idx: int) -> LlamaAttention:
    own = config.layer_config(layer_idx)
    attention = ATTENTION[own.model_type](own, layer_idx)
    for module in attention.modules():
        # transformers changes the attention function in the model's configuration object.
        if hasattr(module, "config"):
            module.config = config
    return attention


class MixedDiffForCausalLM(MixedDiffPreTrainedModel, LlamaForCausalLM):
    """``MixedDiffModel`` with the projection of its outputs to the vocabulary."""

    def __init__(self, config: MixedDiffConfig) -> None:
        # LlamaForCausalLM's constructor would also build a complete LlamaModel, so skip it.
        PreTrainedModel.__init__(self, config)
        self.model = MixedDiffModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
