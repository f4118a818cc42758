# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama whose attention has an output gate; see modeling_gated_llama.py."""

from typing import Any, ClassVar

from .configuration_diff_base import DiffBaseConfig


class GatedLlamaConfig(DiffBaseConfig):
    """Llama's configuration with the keys of the gate and of the norms of queries and keys.

    Args:
        output_gate: None, or the gate that multiplies the outputs of the heads: "headwise" for a
            number per head, "elementwise" for a number per channel of each head.
        qk_norm: whether an RMSNorm is applied to each query head and key head before RoPE.
        kwargs: Llama's keys, such as ``hidden_size``, and arguments of ``PretrainedConfig``.
    """

    model_type = "gated_llama"
    base_model_tp_plan: ClassVar = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.output_gate": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        **DiffBaseConfig.base_model_tp_plan,
    }

    def __init__(
        self, output_gate: str | None = "elementwise", qk_norm: bool = False, **kwargs: Any
    ) -> None:
        self.output_gate = output_gate
        self.qk_norm = qk_norm
        super().__init__(**kwargs)

    def _check_attention(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it must divide "
                f"num_attention_heads {self.num_attention_heads}"
            )
