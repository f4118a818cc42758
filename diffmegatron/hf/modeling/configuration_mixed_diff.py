# SPDX-License-Identifier: Apache-2.0
"""Configuration of a Llama whose layers have different attention; see modeling_mixed_diff.py."""

from typing import Any

from transformers import (
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
)

from .configuration_diff_base import SLIDING, DiffBaseConfig
from .configuration_diff_v2 import DiffV2Config
from .configuration_gated_llama import GatedLlamaConfig
from .configuration_grouped_diff import GroupedDiffConfig

KINDS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "seed_oss": SeedOssConfig,
    "grouped_diff": GroupedDiffConfig,
    "diff_v2": DiffV2Config,
    "gated_llama": GatedLlamaConfig,
}


# Model types whose layers never have "sliding_attention" in ``layer_types`` of the mixed model.
WITHOUT_WINDOWS = ("llama", "mistral", "seed_oss")


class MixedDiffConfig(DiffBaseConfig):
    """Llama's configuration with a kind of attention for each layer.

    Args:
        layer_kinds: list of mappings, one for each kind of attention. A mapping has the keys
            ``layers``, ``model_type`` and the attention keys of this model type. ``layers`` has
            layer numbers from 1, e.g. "1, 5-8", or None for all remaining layers. The default is
            Llama's attention in all layers.
        lambda_std_dev: standard deviation of the initial values of the lambda vectors in layers
            with grouped differential attention.
        kwargs: Llama's keys, such as ``hidden_size`` and ``layer_types``, and arguments of
            ``PretrainedConfig``. The first mapping gives the numbers of heads; only serving
            engines read them.
    """

    model_type = "mixed_diff"

    def __init__(
        self,
        layer_kinds: list[dict[str, Any]] | None = None,
        lambda_std_dev: float = 0.1,
        **kwargs: Any,
    ) -> None:
        # transformers calls this constructor without arguments when it saves a configuration, so
        # layer_kinds needs a default.
        given = layer_kinds or [{"layers": None, "model_type": "llama"}]
        self.layer_kinds = [_with_signal_heads(each) for each in given]
        self.lambda_std_dev = lambda_std_dev
        super().__init__(**kwargs)

    def layer_kind(self, layer_idx: int) -> dict[str, Any]:
        """Return the entry of ``layer_kinds`` for the layer with index ``layer_idx`` (from 0)."""
        named = [each for each in self.layer_kinds if layer_idx + 1 in _numbers(each["layers"])]
        rest = [each for each in self.layer_kinds if each["layers"] is None]
        if len(named) > 1 or len(rest) > 1 or not named + rest:
            raise ValueError(
                f"layer_kinds has {len(named) or len(rest)} entries for layer {layer_idx + 1}; "
                "give each layer one"
            )
        return (named + rest)[0]

    def layer_config(self, layer_idx: int) -> PretrainedConfig:
        """Return the configuration of the layer with index ``layer_idx`` (from 0)."""
        own = {"head_dim": self.head_dim, **self.layer_kind(layer_idx)}
        own.pop("layers")
        model_type = own.pop("model_type")
        if model_type == "mistral":
            own["attention_bias"] = False  # LlamaAttention reads this key.
        elif model_type not in WITHOUT_WINDOWS:
            own |= {"layer_types": self.layer_types, "sliding_window": self.sliding_window}
        if model_type in ("qwen2", "qwen3"):
            own["use_sliding_window"] = self.sliding_window is not None
        return KINDS[model_type](
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            rms_norm_eps=self.rms_norm_eps,
            **own,
        )

    def _check_attention(self) -> None:
        for each in self.layer_kinds:
            if each.get("model_type") not in KINDS:
                raise ValueError(
                    f"layer_kinds has model_type {each.get('model_type')!r}; give one of "
                    f"{', '.join(KINDS)}"
                )
        for layer_idx in range(self.num_hidden_layers):
            each = self.layer_kind(layer_idx)
            if each["model_type"] in WITHOUT_WINDOWS and self.layer_types[layer_idx] == SLIDING:
                raise ValueError(
                    f"layer_types has {SLIDING!r} for layer {layer_idx + 1}, and its model_type "
                    f"{each['model_type']!r} has no windows here; give 'gated_llama'"
                )
            if each.get("head_dim", self.head_dim) != self.head_dim:
                raise ValueError(
                    f"layer_kinds has head_dim {each['head_dim']} and the model {self.head_dim}; "
                    "give all layers the same"
                )


def _with_signal_heads(kind: dict[str, Any]) -> dict[str, Any]:
    """Return a mapping of ``layer_kinds`` with the present keys of ``GroupedDiffConfig``."""
    if kind.get("model_type") != "grouped_diff" or "num_signal_heads" in kind:
        return kind
    names = ("num_attention_heads", "signal_per_noise", "num_key_value_heads")
    config = GroupedDiffConfig(**{name: kind[name] for name in names if name in kind})
    return kind | {name: getattr(config, name) for name in (*names, "num_signal_heads")}


def _numbers(layers: str | None) -> list[int]:
    numbers: list[int] = []
    for each in (layers or "").split(","):
        first, _, last = each.strip().partition("-")
        numbers += range(int(first), int(last or first) + 1) if first else ()
    return numbers
