"""Convert a recipe's network to the configuration of a Hugging Face model, and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from transformers import CONFIG_NAME, AutoConfig, PretrainedConfig

from diffmegatron.config.model_config import ModelConfig, RopeScaling
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_json, shorten
from diffmegatron.hf.kinds import HuggingFace, NetworkExport, model_types, read_attention
from diffmegatron.hf.kinds.network import FULL, SLIDING, WINDOWED, sliding_layers
from diffmegatron.hf.modeling import CLASSES, register
from diffmegatron.hf.modeling.configuration_diff_base import rope_of_transformers_4
from diffmegatron.section import MAX_SIZE
from diffmegatron.validation import describe_error, first_error

# Fields of config.json -> supported values. Error messages name the first value.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "is_causal": (True, None),
    "is_encoder_decoder": (False, None),
    "quantization_config": (None,),
}
# Model type -> fields that this model type adds to _NEUTRAL or replaces in it.
_NEUTRAL_OF: dict[str, dict[str, tuple[Any, ...]]] = {
    "seed_oss": {
        "attention_bias": (True,),
        "attention_out_bias": (False,),
        "residual_dropout": (0,),
    }
}
# File of a PEFT adapter.
_ADAPTER = "adapter_config.json"
# transformers creates lists with an entry per layer. Too many layers would exhaust memory.
_MAX_LAYERS = 10_000
# Kind of RoPE scaling -> {key in a recipe's rope_scaling: key in rope_parameters of config.json}.
_SCALINGS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_length": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_length": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}


def to_hf_config(recipe: Recipe, end_of_document: int, dtype: torch.dtype) -> PretrainedConfig:
    """Return the configuration of the Hugging Face class that computes the recipe's network."""
    model = recipe.model
    described = hugging_face_class(model)
    values = network_keys(model, described.model_type) | {
        **described.fixed,
        "max_position_embeddings": recipe.training.seq_length,
        "initializer_range": model.initialization.std,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        # transformers does not train the embedding row of the padding id. The tokenizer pads with
        # the end-of-document token, whose row must be trained.
        "pad_token_id": None,
        "dtype": dtype,
        "architectures": [described.architecture],
    }
    if described.remote_code:
        register()
    return AutoConfig.for_model(described.model_type, **values)


def write_config(config: PretrainedConfig, directory: Path) -> None:
    """Write ``config.json`` so that transformers 5 and 4.57 use the same rotary embedding.

    transformers 4.57 reads ``rope_theta`` and ``rope_scaling`` instead of ``rope_parameters``.
    """
    config.save_pretrained(directory)
    path = directory / CONFIG_NAME
    values = read_json(path, dict[str, Any])
    values |= rope_of_transformers_4(values["rope_parameters"])
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def hugging_face_class(model: ModelConfig) -> HuggingFace:
    """Return the description of the Hugging Face class that computes a recipe's network."""
    return _export(model).hugging_face()


def _export(model: ModelConfig) -> NetworkExport:
    return NetworkExport(model.attention, model.hidden_size, model.num_layers)


def network_keys(model: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the keys of a configuration of ``model_type`` that describe a recipe's network."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if (scaling := model.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind} | _rope_parameters(scaling)
    return {
        "vocab_size": model.tokens,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "rope_parameters": rope,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        **_export(model).hugging_face().config,
        **_export(model).window_keys(model_type),
    }


def _rope_parameters(scaling: RopeScaling) -> dict[str, Any]:
    """Return the keys of ``rope_parameters`` that describe a scaling, without its kind."""
    found = {}
    for ours, theirs in _SCALINGS[scaling.kind].items():
        value = getattr(scaling, ours)
        # The defaults of yarn's own keys are those of transformers, so a model may lack these keys.
        is_default = value == RopeScaling.model_fields[ours].default
        if scaling.kind != "yarn" or ours == "original_length" or not is_default:
            found[theirs] = value
    return found


def changed_keys(config: PretrainedConfig, recipe: Recipe) -> dict[str, Any]:
    """Return the keys of a pretrained model's configuration that a recipe changes, with new values.

    ``max_position_embeddings`` changes only if the recipe's sequences are longer.
    """
    changed = {}
    for key, value in network_keys(recipe.model, config.model_type).items():
        own = getattr(config, key, None)
        # The pretrained model may have more RoPE parameters, and the recipe leaves defaults out.
        is_same = _is_same_rope(value, own or {}) if key == "rope_parameters" else own == value
        if not is_same:
            changed[key] = value
    if recipe.training.seq_length > config.max_position_embeddings:
        changed["max_position_embeddings"] = recipe.training.seq_length
    return changed


def _is_same_rope(value: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Return whether a pretrained model's ``rope_parameters`` mean the same as a recipe's."""
    if not value.items() <= own.items():
        return False
    sections = (_rope_scaling(value), _rope_scaling(own))
    one, other = (each and RopeScaling.model_validate(each) for each in sections)
    return one == other


def load_config(folder: Path) -> PretrainedConfig:
    """Load the configuration of any model that transformers or this package has a class for."""
    path = folder / CONFIG_NAME
    if (folder / _ADAPTER).exists():
        raise UserError(
            f"{format_path(folder)} has an {_ADAPTER} beside its {CONFIG_NAME}, and the adapter "
            "would be ignored; merge it into the weights and save these without it"
        )
    raw = read_json(path, dict[str, Any])
    if "num_hidden_layers" in raw:
        _check_count(path, raw, "num_hidden_layers", _MAX_LAYERS)
    register()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many classes of exceptions here.
        raise UserError(f"{format_path(path)} cannot be used: {shorten(str(error))}") from None
    attention = config._attn_implementation
    if attention is not None and not (isinstance(attention, str) and attention.isidentifier()):
        raise UserError(
            f"{format_path(path)} has attn_implementation {shorten(repr(attention))}, whose code "
            "would be downloaded; remove the key"
        )
    config._attn_implementation = None  # transformers then uses its default
    return config


def read_config(folder: Path) -> PretrainedConfig:
    """Load a pretrained model's configuration; refuse networks that no recipe can express."""
    path = folder / CONFIG_NAME
    raw = read_json(path, dict[str, Any])
    known = model_types()
    if raw.get("model_type") not in known:
        raise _no_equivalent(path, "model_type", raw.get("model_type"), ", ".join(known))
    _check_count(path, raw, "num_hidden_layers", _MAX_LAYERS)
    _check_code(path, raw)
    config = load_config(folder)
    values = config.to_dict()
    for key in ("num_attention_heads", "num_key_value_heads"):
        _check_count(path, values, key, MAX_SIZE)
    neutral = _NEUTRAL | _NEUTRAL_OF.get(values["model_type"], {})
    for key, allowed in neutral.items():
        if values.get(key) not in allowed:
            raise _no_equivalent(path, key, values[key], str(allowed[0]))
    _check_windows(path, values)
    _check_rope(path, raw, values["rope_parameters"])
    return config


def _check_windows(path: Path, values: Mapping[str, Any]) -> None:
    model_type, window = values["model_type"], values.get("sliding_window")
    types = sorted({*(values.get("layer_types") or ())})
    known = {FULL, SLIDING} if model_type in WINDOWED else {FULL}
    if not known.issuperset(types):
        raise _no_equivalent(path, "layer_types", types, ", ".join(sorted(known)))
    if any(sliding_layers(values)):
        _check_count(path, values, "sliding_window", MAX_SIZE)
    elif model_type not in WINDOWED and window is not None:
        raise _no_equivalent(path, "sliding_window", window, "null")


def _check_count(path: Path, values: Mapping[str, Any], key: str, most: int) -> None:
    value = values.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise UserError(
            f"{format_path(path)} has {key} {shorten(repr(value))}; give a number from 1 to {most}"
        )


def _check_code(path: Path, raw: Mapping[str, Any]) -> None:
    code = raw.get("auto_map")
    own = [config().auto_map for config, *_ in CLASSES if config.model_type == raw["model_type"]]
    if code is not None and code not in own:
        raise UserError(
            f"{format_path(path)} has auto_map {shorten(repr(code))}, code that is not run here; "
            f"if transformers' {raw['model_type']} computes the same, remove the key"
        )


def _check_rope(path: Path, raw: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    # Files of transformers 4 have rope_scaling instead of rope_parameters.
    section = "rope_parameters" if "rope_parameters" in raw else "rope_scaling"
    if nested := [key for key, value in rope.items() if isinstance(value, Mapping)]:
        raise _no_equivalent(path, f"{section}.{nested[0]}", rope[nested[0]], "one for all layers")
    kind, share = rope.get("rope_type"), rope.get("partial_rotary_factor", 1)
    known = ("default", *_SCALINGS)
    if kind not in known:
        raise _no_equivalent(path, f"{section}.rope_type", kind, ", ".join(known))
    if share != 1:
        raise _no_equivalent(path, "partial_rotary_factor", share, "1")
    for key in ("rope_theta", *_SCALINGS.get(kind, {}).values()):
        if isinstance(rope.get(key), str):
            raise UserError(
                f"{format_path(path)} has {key} {shorten(repr(rope[key]))}, a text; give a number"
            )
    # transformers 4 and 5 read each key at different places: the top level or the section. Both
    # values must therefore be equal.
    own = raw.get(section) or {}
    for key in ("rope_theta", "original_max_position_embeddings"):
        within = own.get(key, rope.get(key))
        if raw.get(key) is not None and raw[key] != within:
            raise UserError(
                f"{format_path(path)} has {key} {shorten(repr(raw[key]))}, but in {section} it is "
                f"{shorten(repr(within))}; keep one of the two"
            )


def _no_equivalent(path: Path, field: str, value: object, known: str) -> UserError:
    return UserError(
        f"{format_path(path)} has {field} {shorten(repr(value))}, which has no equivalent here; "
        f"only models with {known} can be imported"
    )


def model_section(config: PretrainedConfig, vocab_padding: int) -> dict[str, Any]:
    """Return the section ``model`` of a recipe for a configuration from :func:`read_config`.

    ``vocab_padding`` is the number of unused rows to add to the vocabulary.
    """
    values = config.to_dict()
    model_type, rope = values["model_type"], values["rope_parameters"]
    try:
        attention = read_attention(values)
    except ValidationError as error:
        problem = describe_error(first_error(error), ())
        raise UserError(f"{CONFIG_NAME} of model_type {model_type!r}: {problem}") from None
    except KeyError as error:
        raise UserError(
            f"{CONFIG_NAME} of model_type {model_type!r} lacks {error}; add the key"
        ) from None
    return {
        "num_layers": values["num_hidden_layers"],
        "hidden_size": values["hidden_size"],
        "attention": attention,
        "ffn_hidden_size": values["intermediate_size"],
        "vocab_size": values["vocab_size"] + vocab_padding,
        "vocab_padding": vocab_padding,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": _rope_scaling(rope),
        "norm_eps": values["rms_norm_eps"],
        "tied_embeddings": values["tie_word_embeddings"],
    }


def _rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section ``rope_scaling`` of a recipe for the section ``rope_parameters``."""
    if (kind := rope["rope_type"]) == "default":
        return None
    given = {ours: rope[theirs] for ours, theirs in _SCALINGS[kind].items() if theirs in rope}
    if kind == "yarn":
        # transformers takes its default for null, and ignores what the recipe would refuse.
        given = {
            ours: value for ours, value in given.items() if value is not None or ours == "factor"
        }
        if "attention_factor" in given or not (given.get("mscale") and given.get("mscale_all_dim")):
            given = {ours: each for ours, each in given.items() if not ours.startswith("mscale")}
    return {"kind": kind} | given
