# SPDX-License-Identifier: Apache-2.0
"""Base classes for the configurations of exported models with differential attention."""

from typing import Any, ClassVar

import transformers
from transformers import PretrainedConfig
from transformers.utils.versions import require_version

# 4.57 is the oldest version whose Llama has the functions that the models call.
require_version("transformers>=4.57")


FULL, SLIDING = "full_attention", "sliding_attention"


class DiffBaseConfig(PretrainedConfig):
    """Configuration with Llama's keys, except those for biases and dropout.

    As in Qwen2's configuration, ``layer_types`` has an entry for each layer. A query of a layer
    with "sliding_attention" sees its own key and the ``sliding_window`` - 1 keys before it.

    A subclass sets the keys of its attention before it calls this constructor, which checks them.
    The constructor derives ``auto_map`` from names. A subclass ``NameConfig`` with ``model_type``
    "kind" must be in ``configuration_kind.py``. Its models ``NameModel`` and ``NameForCausalLM``
    must be in ``modeling_kind.py``.
    """

    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }
    # The projections of an attention are in the plans of subclasses that can be sharded.
    base_model_tp_plan: ClassVar = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    # Llama's classes read these keys. The models have no biases and no dropout.
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
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> None:
        sizes = {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads,
            "num_key_value_heads": num_key_value_heads,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            check_positive(name, size)
            setattr(self, name, size)
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; RoPE needs an even number")
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        self.rope_parameters = rope_parameters
        # Older exports lack both keys.
        self.layer_types = layer_types or [FULL] * num_hidden_layers
        self.sliding_window = sliding_window
        _check_windows(self.layer_types, num_hidden_layers, sliding_window)
        gate = getattr(self, "output_gate", None)
        if gate not in (None, "elementwise", "headwise"):
            raise ValueError(
                f"output_gate is {gate!r}; it must be 'elementwise', 'headwise' or null"
            )
        self._check_attention()
        for name in ("attention_bias", "attention_dropout", "mlp_bias"):
            if kwargs.get(name):
                raise ValueError(
                    f"{name} is {kwargs[name]!r}; this model has no biases and no dropout"
                )
        kind, name = self.model_type, type(self).__name__.removesuffix("Config")
        auto_map = {
            "AutoConfig": f"configuration_{kind}.{name}Config",
            "AutoModel": f"modeling_{kind}.{name}Model",
            "AutoModelForCausalLM": f"modeling_{kind}.{name}ForCausalLM",
        }
        kwargs.setdefault("auto_map", auto_map)
        for key in ("rope_theta", "rope_scaling"):
            kwargs.pop(key, None)
        if transformers.__version__.startswith("4."):
            kwargs |= rope_of_transformers_4(rope_parameters)
        # Without these arguments, transformers 4 would set other values, such as tied embeddings.
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def _check_attention(self) -> None:
        """Raise ValueError if a key of the attention is invalid; subclasses override this."""


def _check_windows(layer_types: list[str], layers: int, sliding_window: int | None) -> None:
    if len(layer_types) != layers or not {*layer_types} <= {FULL, SLIDING}:
        raise ValueError(
            f"layer_types is {layer_types!r}; give {layers} entries, each {FULL!r} or {SLIDING!r}"
        )
    if sliding_window is not None or SLIDING in layer_types:
        check_positive("sliding_window", sliding_window)


def check_positive(name: str, value: object) -> None:
    """Raise ValueError if a key's value is not a positive integer."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a positive integer")


def count_noise_heads(num_query_heads: int, signal_per_noise: int) -> int:
    """Return the number of noise heads, h / r, of h + h / r query heads; r is signal_per_noise."""
    check_positive("num_attention_heads", num_query_heads)
    check_positive("signal_per_noise", signal_per_noise)
    group = signal_per_noise + 1
    if num_query_heads % group:
        raise ValueError(
            f"num_attention_heads is {num_query_heads}; with signal_per_noise {signal_per_noise} "
            f"it must be a multiple of {group}, because it counts signal and noise heads"
        )
    return num_query_heads // group


def rope_of_transformers_4(rope_parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return ``rope_theta`` and, for a scaled RoPE, ``rope_scaling``, which transformers 4 reads.

    transformers 5 reads ``rope_parameters`` instead, and warns of ``rope_scaling``.
    """
    scaling = dict(rope_parameters or {})
    theta = scaling.pop("rope_theta", 10_000.0)
    is_scaled = scaling.get("rope_type", "default") != "default"
    return {"rope_theta": theta} | ({"rope_scaling": scaling} if is_scaled else {})
