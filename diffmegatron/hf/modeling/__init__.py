"""Models that transformers has no class for, as files that an export carries with its weights.

The pairs of files beside this one import torch and transformers alone. Their names are those of
``model_type``: ``configuration_<model_type>.py`` and ``modeling_<model_type>.py``. Every
configuration of theirs has the ``auto_map`` that leads ``trust_remote_code=True`` to them.
"""

from pathlib import Path

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from diffmegatron.hf.modeling.configuration_diff_v2 import DiffV2Config
from diffmegatron.hf.modeling.configuration_grouped_diff import GroupedDiffConfig
from diffmegatron.hf.modeling.configuration_mixed_diff import MixedDiffConfig
from diffmegatron.hf.modeling.modeling_diff_v2 import DiffV2ForCausalLM, DiffV2Model
from diffmegatron.hf.modeling.modeling_grouped_diff import GroupedDiffForCausalLM, GroupedDiffModel
from diffmegatron.hf.modeling.modeling_mixed_diff import MixedDiffForCausalLM, MixedDiffModel

CLASSES = (
    (DiffV2Config, DiffV2Model, DiffV2ForCausalLM),
    (GroupedDiffConfig, GroupedDiffModel, GroupedDiffForCausalLM),
    (MixedDiffConfig, MixedDiffModel, MixedDiffForCausalLM),
)


def register() -> None:
    """Make transformers' Auto classes load these models without remote code; any number of times.

    A model saved from them takes its files along, as one loaded from remote code does.
    """
    for config, model, causal_lm in CLASSES:
        AutoConfig.register(config.model_type, config, exist_ok=True)
        AutoModel.register(config, model, exist_ok=True)
        AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
        config.register_for_auto_class("AutoConfig")
        model.register_for_auto_class("AutoModel")
        causal_lm.register_for_auto_class("AutoModelForCausalLM")


def remote_files(model_type: str) -> list[Path]:
    """The files to lie beside the weights of a model, so that it loads without this package.

    Args:
        model_type: of the model's configuration; of one that transformers has there are none.
    """
    own = [config.model_type for config, *_ in CLASSES]
    if model_type not in own:
        return []
    # The class with layers of several kinds builds on the others.
    types = own if model_type == MixedDiffConfig.model_type else [model_type]
    parts = ("configuration", "modeling")
    return [Path(__file__).with_name(f"{part}_{each}.py") for each in types for part in parts]
