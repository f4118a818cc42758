# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama whose attention is DIFF V2; see modeling_diff_v2.py."""

from typing import ClassVar

from .configuration_diff_base import NoiseHeadsConfig


class DiffV2Config(NoiseHeadsConfig):
    """Llama's configuration with the additional key ``signal_per_noise``.

    Args:
        num_attention_heads: number of query heads: h signal heads and h / r noise heads.
        signal_per_noise: r, number of signal heads that share a noise head.
        num_key_value_heads: number of key heads, and also of value heads. It must divide h / r.
        kwargs: Llama's keys, such as ``hidden_size``, and arguments of ``PretrainedConfig``.
    """

    model_type = "diff_v2"
    base_model_tp_plan: ClassVar = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.lambda_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        **NoiseHeadsConfig.base_model_tp_plan,
    }

    # transformers 5 turns a class without its own constructor into a dataclass.
    __init__ = NoiseHeadsConfig.__init__

    def _check_attention(self) -> None:
        super()._check_attention()
        if self.num_noise_heads % self.num_key_value_heads:
            group = self.signal_per_noise + 1
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it must divide the "
                f"{self.num_noise_heads} groups of {group} query heads, because a group has one "
                "key head"
            )
