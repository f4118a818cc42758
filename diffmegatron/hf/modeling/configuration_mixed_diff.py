# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama with layers of several kinds; see modeling_mixed_diff.py."""

from typing import Any, ClassVar

from transformers import LlamaConfig, PretrainedConfig

from .configuration_diff_v2 import DiffV2Config
from .configuration_grouped_diff import GroupedDiffConfig, _rope_of_transformers_4

AUTO_MAP = {
    "AutoConfig": "configuration_mixed_diff.MixedDiffConfig",
    "AutoModel": "modeling_mixed_diff.MixedDiffModel",
    "AutoModelForCausalLM": "modeling_mixed_diff.MixedDiffForCausalLM",
}
KINDS = {"llama": LlamaConfig, "grouped_diff": GroupedDiffConfig, "diff_v2": DiffV2Config}


class MixedDiffConfig(PretrainedConfig):
    """Llama's configuration and a kind of attention for each layer.

    Args:
        layer_kinds: mappings with ``layers``, ``model_type`` and the attention keys of that type.
            ``layers`` has numbers from 1, such as "1, 5-8", or in one mapping null for all
            remaining layers.
        num_attention_heads: query heads of the first mapping, as for ``num_key_value_heads``.
        head_dim: d, channels of a query and of a key in all layers.
        lambda_std_dev: standard deviation of new lambda vectors.
        kwargs: arguments of ``PretrainedConfig``.

    Raises:
        ValueError: a layer has no kind or several, or the numbers do not describe a layer.
    """

    model_type = "mixed_diff"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
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
        num_attention_heads: int = 32,
        num_key_value_heads: int = 32,
        head_dim: int = 128,
        layer_kinds: list[dict[str, Any]] | None = None,
        lambda_std_dev: float = 0.1,
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
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        # transformers creates a configuration without arguments, for comparison.
        self.layer_kinds = layer_kinds or [{"layers": None, "model_type": "llama"}]
        self.lambda_std_dev = lambda_std_dev
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.rope_parameters = rope_parameters
        kinds = [self.layer_kind(layer) for layer in range(num_hidden_layers)]
        self._check_kinds(kinds)
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        # transformers 4 reads these only from this call, and would otherwise tie the embeddings.
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **_rope_of_transformers_4(rope_parameters) | kwargs,
        )

    def layer_kind(self, layer_idx: int) -> dict[str, Any]:
        """Return the entry of ``layer_kinds`` for a layer, counted from 0."""
        named = [each for each in self.layer_kinds if layer_idx + 1 in _numbers(each["layers"])]
        rest = [each for each in self.layer_kinds if each["layers"] is None]
        if len(named) > 1 or len(rest) > 1 or not named + rest:
            raise ValueError(
                f"layer_kinds has {len(named) or len(rest)} entries for layer {layer_idx + 1}; "
                "give each layer one"
            )
        return (named + rest)[0]

    def layer_config(self, layer_idx: int) -> PretrainedConfig:
        """Return the configuration of the model type of a layer's attention."""
        own = dict(self.layer_kind(layer_idx))
        own.pop("layers")
        return KINDS[own.pop("model_type")](
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            rms_norm_eps=self.rms_norm_eps,
            **{"head_dim": self.head_dim, **own},
        )

    def _check_kinds(self, kinds: list[dict[str, Any]]) -> None:
        for each in kinds:
            if each.get("model_type") not in KINDS:
                raise ValueError(
                    f"layer_kinds has model_type {each.get('model_type')!r}; give one of "
                    f"{', '.join(KINDS)}"
                )
            if each.get("head_dim", self.head_dim) != self.head_dim:
                raise ValueError(
                    f"layer_kinds has head_dim {each['head_dim']} and the model {self.head_dim}; "
                    "give all layers the same"
                )


def _numbers(layers: str | None) -> list[int]:
    numbers: list[int] = []
    for each in (layers or "").split(","):
        first, _, last = each.strip().partition("-")
        numbers += range(int(first), int(last or first) + 1) if first else ()
    return numbers
