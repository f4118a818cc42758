# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama with grouped differential attention; see modeling_grouped_diff.py."""

import math
from typing import Any

from .configuration_diff_base import DiffBaseConfig, check_positive, count_noise_heads


class GroupedDiffConfig(DiffBaseConfig):
    """Llama's configuration with the keys of grouped differential attention.

    There are h signal heads, h / r noise heads and h_kv differential key-value heads. h_kv must
    divide h / r. Serving engines size attention and cache by ``num_attention_heads`` and
    ``num_key_value_heads``, so these count the heads of a layer's single attention call.

    Args:
        num_signal_heads: h. The configurations of older exports do not have this key. There,
            ``num_attention_heads`` is h + h / r, and ``num_key_value_heads`` is 2 h_kv.
        signal_per_noise: r, number of signal heads that share a noise head.
        num_attention_heads: 4 h.
        num_key_value_heads: 4 h_kv.
        lambda_init: "exponential" for 0.8 - 0.6 exp(-0.3 l) in layer l (from 0), or a constant
            between 0 and 1 for all layers.
        lambda_std_dev: standard deviation of the initial values of the four lambda vectors.
        qk_norm: whether an RMSNorm is applied to each query head and key head before RoPE.
        output_gate: None, or the gate that multiplies the outputs of the heads: "headwise" for a
            number per head, "elementwise" for a number per channel of each head.
        headwise_norm: whether an RMSNorm follows the subtraction of the noise heads' outputs. All
            heads share its weight. Its result is multiplied by 1 - lambda_init.
        kwargs: Llama's keys, such as ``hidden_size``, and arguments of ``PretrainedConfig``.
    """

    model_type = "grouped_diff"

    def __init__(
        self,
        num_attention_heads: int = 20,
        signal_per_noise: int = 4,
        num_key_value_heads: int = 8,
        lambda_init: float | str = "exponential",
        lambda_std_dev: float = 0.1,
        headwise_norm: bool = True,
        num_signal_heads: int | None = None,
        qk_norm: bool = False,
        output_gate: str | None = None,
        **kwargs: Any,
    ) -> None:
        if num_signal_heads is None:
            noise_heads = count_noise_heads(num_attention_heads, signal_per_noise)
            num_signal_heads = noise_heads * signal_per_noise
            num_attention_heads = 4 * num_signal_heads
            num_key_value_heads *= 2
        self.num_signal_heads = num_signal_heads
        self.signal_per_noise = signal_per_noise
        self.lambda_init = lambda_init
        self.lambda_std_dev = lambda_std_dev
        self.qk_norm = qk_norm
        self.output_gate = output_gate
        self.headwise_norm = headwise_norm
        super().__init__(
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            **kwargs,
        )

    @property
    def num_noise_heads(self) -> int:
        """Number of noise heads, h / r."""
        return self.num_signal_heads // self.signal_per_noise

    @property
    def num_differential_kv_heads(self) -> int:
        """Number of differential key-value heads, h_kv."""
        return self.num_key_value_heads // 4

    def layer_lambda_init(self, layer_idx: int) -> float:
        """Return lambda_init of a layer; the first layer has index 0."""
        if isinstance(self.lambda_init, str):
            return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        return self.lambda_init

    def _check_attention(self) -> None:
        for name in ("num_signal_heads", "signal_per_noise"):
            check_positive(name, getattr(self, name))
        if self.num_signal_heads % self.signal_per_noise:
            raise ValueError(
                f"num_signal_heads is {self.num_signal_heads}; it must be a multiple of "
                f"signal_per_noise {self.signal_per_noise}"
            )
        if self.num_attention_heads != 4 * self.num_signal_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it must be 4 times "
                f"num_signal_heads {self.num_signal_heads}"
            )
        kv_heads = self.num_differential_kv_heads
        if self.num_key_value_heads % 4 or self.num_noise_heads % kv_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it must be 4 times a divisor "
                f"of the {self.num_noise_heads} noise heads"
            )
        value = self.lambda_init
        if value != "exponential" and not (isinstance(value, float) and 0 < value < 1):
            raise ValueError(
                f"lambda_init is {value!r}; it must be 'exponential' or a number between 0 and 1"
            )
