# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama with grouped differential attention; see modeling_grouped_diff.py."""

import math
from typing import Any

from .configuration_diff_base import NoiseHeadsConfig


class GroupedDiffConfig(NoiseHeadsConfig):
    """Llama's configuration with the keys of grouped differential attention.

    Args:
        num_attention_heads: number of query heads: h signal heads and h / r noise heads.
        signal_per_noise: r, number of signal heads that share a noise head.
        num_key_value_heads: twice the number h_kv of differential key-value heads, because each has
            two keys. h_kv must divide h / r.
        lambda_init: "exponential" for 0.8 - 0.6 exp(-0.3 l) in layer l (from 0), or a constant
            between 0 and 1 for all layers.
        lambda_std_dev: standard deviation of the initial values of the four lambda vectors.
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
        **kwargs: Any,
    ) -> None:
        self.lambda_init = lambda_init
        self.lambda_std_dev = lambda_std_dev
        self.headwise_norm = headwise_norm
        super().__init__(num_attention_heads, signal_per_noise, num_key_value_heads, **kwargs)

    def layer_lambda_init(self, layer_idx: int) -> float:
        """Return lambda_init of a layer; the first layer has index 0."""
        if isinstance(self.lambda_init, str):
            return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        return self.lambda_init

    def _check_attention(self) -> None:
        super()._check_attention()
        if self.num_key_value_heads % 2 or self.num_noise_heads % (self.num_key_value_heads // 2):
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}; it must be even, because it "
                "counts keys of signal and of noise, and its half must divide the "
                f"{self.num_noise_heads} noise heads"
            )
        value = self.lambda_init
        if value != "exponential" and not (isinstance(value, float) and 0 < value < 1):
            raise ValueError(
                f"lambda_init is {value!r}; it must be 'exponential' or a number between 0 and 1"
            )
