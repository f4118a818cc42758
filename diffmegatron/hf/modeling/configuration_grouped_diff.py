# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama with grouped differential attention; see modeling_grouped_diff.py."""

import math
from typing import Any, ClassVar

from transformers import PretrainedConfig
from transformers.utils.versions import require_version

# The oldest version whose Llama has the functions that the model calls; older ones raise an error.
require_version("transformers>=4.57")

AUTO_MAP = {
    "AutoConfig": "configuration_grouped_diff.GroupedDiffConfig",
    "AutoModel": "modeling_grouped_diff.GroupedDiffModel",
    "AutoModelForCausalLM": "modeling_grouped_diff.GroupedDiffForCausalLM",
}


class GroupedDiffConfig(PretrainedConfig):
    """Llama's configuration and the keys of grouped differential attention.

    Args:
        num_attention_heads: query heads of ``head_dim``, signal and noise together: h signal heads
            and h / r noise heads, h (r + 1) / r in total.
        signal_per_noise: r, number of signal heads that share a noise head; 1 is the Differential
            Transformer.
        num_key_value_heads: key heads of ``head_dim``: 2 h_kv, because each of the h_kv
            differential key-value heads has two keys, and a value as wide as both. h_kv divides h /
            r.
        head_dim: d, channels of a query and of a key, even; the output of a head has 2d.
        lambda_init: "exponential", 0.8 - 0.6 exp(-0.3 l) in layer l from 0; or a constant for all
            layers, between 0 and 1.
        lambda_std_dev: standard deviation of new lambda vectors.
        headwise_norm: whether each head's output passes an RMSNorm (one weight for all heads) and
            is scaled by 1 - lambda_init.
        kwargs: arguments of ``PretrainedConfig``.

    Raises:
        ValueError: the numbers do not describe a model.
    """

    model_type = "grouped_diff"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    # Attention has no plan, because the rows of q_proj and k_proj of a rank are not contiguous.
    base_model_tp_plan: ClassVar = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    # Llama's classes read these; this model has no biases and no dropout.
    attention_bias = False
    attention_dropout = 0.0
    mlp_bias = False

    def __init__(
        self,
        vocab_size: int = 32000,
        hidden_size: int = 4096,
        intermediate_size: int = 11008,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 20,
        signal_per_noise: int = 4,
        num_key_value_heads: int = 8,
        head_dim: int = 128,
        lambda_init: float | str = "exponential",
        lambda_std_dev: float = 0.1,
        headwise_norm: bool = True,
        hidden_act: str = "silu",
        max_position_embeddings: int = 4096,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-5,
        use_cache: bool = True,
        pad_token_id: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        tie_word_embeddings: bool = False,
        rope_parameters: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.signal_per_noise = signal_per_noise
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.lambda_init = lambda_init
        self.lambda_std_dev = lambda_std_dev
        self.headwise_norm = headwise_norm
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.rope_parameters = rope_parameters
        self._check_numbers()
        for name in ("attention_bias", "attention_dropout", "mlp_bias"):
            if kwargs.get(name):
                raise ValueError(
                    f"{name} is {kwargs[name]!r}; this model has no biases and no dropout"
                )
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        # transformers 4 reads these only from this call, and would otherwise tie the embeddings.
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **_rope_of_transformers_4(rope_parameters) | kwargs,
        )

    @property
    def num_noise_heads(self) -> int:
        """h / r, number of noise heads."""
        return self.num_attention_heads // (self.signal_per_noise + 1)

    @property
    def num_signal_heads(self) -> int:
        """h, number of signal heads, and of heads of the output."""
        return self.num_noise_heads * self.signal_per_noise

    def layer_lambda_init(self, layer_idx: int) -> float:
        """Return lambda_init of a layer, counted from 0."""
        if isinstance(self.lambda_init, str):
            return 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
        return self.lambda_init

    def _check_numbers(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "signal_per_noise",
            "num_key_value_heads",
            "head_dim",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; RoPE needs an even number")
        group = self.signal_per_noise + 1
        if self.num_attention_heads % group:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; with signal_per_noise "
                f"{self.signal_per_noise} it must be a multiple of {group}, because it counts "
                "signal and noise heads"
            )
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


def _rope_of_transformers_4(rope_parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the two keys that transformers 4 reads instead of ``rope_parameters``.

    transformers 5 converts them back to ``rope_parameters``, and does not save them.
    """
    scaling = dict(rope_parameters or {})
    theta = scaling.pop("rope_theta", 10_000.0)
    is_scaled = scaling.get("rope_type", "default") != "default"
    return {"rope_theta": theta, "rope_scaling": scaling if is_scaled else None}
