# SPDX-License-Identifier: Apache-2.0
"""A Llama whose layers have ordinary attention, grouped differential attention or DIFF V2."""

from typing import ClassVar

from torch import nn
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.seed_oss.modeling_seed_oss import SeedOssAttention

from .configuration_mixed_diff import MixedDiffConfig
from .modeling_diff_base import DiffBaseForCausalLM, DiffBaseModel
from .modeling_diff_v2 import DiffV2Attention
from .modeling_gated_llama import GatedLlamaAttention
from .modeling_grouped_diff import GroupedDiffAttention, GroupedDiffPreTrainedModel

ATTENTION = {
    "llama": LlamaAttention,
    # MistralAttention would take the window of other layers.
    "mistral": LlamaAttention,
    "qwen2": Qwen2Attention,
    "qwen3": Qwen3Attention,
    "seed_oss": SeedOssAttention,
    "grouped_diff": GroupedDiffAttention,
    "diff_v2": DiffV2Attention,
    "gated_llama": GatedLlamaAttention,
}


class MixedDiffPreTrainedModel(GroupedDiffPreTrainedModel):
    """Base class of the models of this file."""

    config_class = MixedDiffConfig  # type: ignore[assignment]
    _can_record_outputs: ClassVar = {
        "hidden_states": Qwen2DecoderLayer,
        # The classes of this package are subclasses of Llama's.
        "attentions": [LlamaAttention, Qwen2Attention, Qwen3Attention, SeedOssAttention],
    }


class MixedDiffModel(MixedDiffPreTrainedModel, DiffBaseModel):
    """Llama's decoder; the configuration selects the kind of attention of each layer."""

    @staticmethod
    def new_attention(config: MixedDiffConfig, layer_idx: int) -> nn.Module:
        """Return the attention of the layer with index ``layer_idx`` (from 0)."""
        own = config.layer_config(layer_idx)
        attention = ATTENTION[own.model_type](own, layer_idx)
        for module in attention.modules():
            # transformers sets the attention function in the model's configuration object, so all
            # modules must have this object.
            if hasattr(module, "config"):
                module.config = config
        return attention


class MixedDiffForCausalLM(MixedDiffPreTrainedModel, DiffBaseForCausalLM):
    """``MixedDiffModel`` with the projection of its outputs to the vocabulary."""

    decoder = MixedDiffModel
