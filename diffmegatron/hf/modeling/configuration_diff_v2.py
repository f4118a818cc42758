# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama whose attention is DIFF V2; see modeling_diff_v2.py."""

from typing import Any, ClassVar

from .configuration_diff_base import DiffBaseConfig, count_noise_heads


class DiffV2Config(DiffBaseConfig):
    """Llama's configuration with the keys of DIFF V2.

    Args:
        num_attention_heads: number of query heads: h signal heads and h / r noise heads.
        signal_per_noise: r, number of signal heads that share a noise head.
        num_key_value_heads: number of key heads, and also of value heads. It must divide h / r.
        qk_norm: whether an RMSNorm is applied to each query head and key head before RoPE.
        output_gate: None, or the gate that multiplies the outputs of the heads: "headwise" for a
            number per head, "elementwise" for a number per channel of each head.
        kwargs: Llama's keys, such as ``hidden_size``, and arguments of ``PretrainedConfig``.
    """

    model_type = "diff_v2"
    base_model_tp_plan: ClassVar = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.lambda_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        **DiffBaseConfig.base_model_tp_plan,
    }

    def __init__(
        self,
        num_attention_heads: int = 64,
        signal_per_noise: int = 1,
        num_key_value_heads: int = 8,
        qk_norm: bool = False,
        output_gate: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.signal_per_noise = signal_per_noise
        self.qk_norm = qk_norm
        self.output_gate = output_gate
        if output_gate is not None:
            gate = {"layers.*.self_attn.output_gate": "colwise"}
            plan = {**type(self).base_model_tp_plan, **gate}
            self.base_model_tp_plan = plan  # type: ignore[misc]
        super().__init__(
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            **kwargs,
        )

    @property
    def num_signal_heads(self) -> int:
        """Number of signal heads, h."""
        return self.num_attention_heads // (self.signal_per_noise + 1) * self.signal_per_noise

    def _check_attention(self) -> None:
        noise_heads = count_noise_heads(self.num_attention_heads, self.signal_per_noise)
        if noise_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it must divide the "
                f"{noise_heads} groups of {self.signal_per_noise + 1} query heads, because a group "
                "has one key head"
            )
