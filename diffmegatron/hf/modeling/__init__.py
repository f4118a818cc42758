"""Model classes for the kinds of attention that transformers has no class for.

An export of such a kind contains the code files of its model and of the base classes. These files
import only torch, transformers and each other. ``auto_map`` in ``config.json`` lets transformers
load them with ``trust_remote_code=True``.
"""

from pathlib import Path

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from diffmegatron.hf.modeling.configuration_diff_v2 import DiffV2Config
from diffmegatron.hf.modeling.configuration_gated_llama import GatedLlamaConfig
from diffmegatron.hf.modeling.configuration_grouped_diff import GroupedDiffConfig
from diffmegatron.hf.modeling.configuration_mixed_diff import MixedDiffConfig
from diffmegatron.hf.modeling.modeling_diff_v2 import DiffV2ForCausalLM, DiffV2Model
from diffmegatron.hf.modeling.modeling_gated_llama import GatedLlamaForCausalLM, GatedLlamaModel
from diffmegatron.hf.modeling.modeling_grouped_diff import GroupedDiffForCausalLM, GroupedDiffModel
from diffmegatron.hf.modeling.modeling_mixed_diff import MixedDiffForCausalLM, MixedDiffModel

CLASSES = (
    (DiffV2Config, DiffV2Model, DiffV2ForCausalLM),
    (GroupedDiffConfig, GroupedDiffModel, GroupedDiffForCausalLM),
    (GatedLlamaConfig, GatedLlamaModel, GatedLlamaForCausalLM),
    (MixedDiffConfig, MixedDiffModel, MixedDiffForCausalLM),
)


def register() -> None:
    """Register the models with transformers' Auto classes; let save_pretrained copy their code."""
    for config, model, causal_lm in CLASSES:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, model, exist_ok=True)
        AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
        config.register_for_auto_class("AutoConfig")
        model.register_for_auto_class("AutoModel")
        causal_lm.register_for_auto_class("AutoModelForCausalLM")


def remote_files(model_type: str) -> list[Path]:
    """Return the code files that an export of a model type needs; [] if it needs none."""
    own = [config.model_type for config, *_ in CLASSES]
    if model_type not in own:
        return []
    # The mixed model imports the files of all other models.
    types = own if model_type == MixedDiffConfig.model_type else [model_type]
    stems = [f"{part}_{each}" for each in types for part in ("configuration", "modeling")]
    stems += ["modeling_diff_base", "configuration_diff_base"]
    return [Path(__file__).with_name(f"{stem}.py") for stem in stems]
