"""Files of the pretrained model that a run started from: config.json, tokenizer and dtypes.

``diffmegatron import`` writes them into a folder, which becomes ``data.tokenizer`` of the recipe.
Only a folder from an import has ``dtypes.json``.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from transformers import CONFIG_NAME, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME

from diffmegatron.attention.variants.hugging_face import HuggingFace
from diffmegatron.config.schema import Recipe
from diffmegatron.files import explain_os_errors, format_path, read_json
from diffmegatron.hf.configuration import changed_keys, read_config, write_config
from diffmegatron.hf.pretrained_weights import DTYPES, Source
from diffmegatron.hf.tokenizer import copy_tokenizer

DTYPES_NAME = "dtypes.json"
_Name = Literal["F16", "BF16", "F32"]


class Dtypes(BaseModel):
    """Content of ``dtypes.json``, in the notation of safetensors.

    Attributes:
        usual: most frequent dtype of the model's tensors.
        others: name of each tensor with another dtype -> its dtype.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    usual: _Name
    others: dict[str, _Name]


@dataclass(frozen=True)
class Original:
    """Configuration and dtypes of the pretrained model that a run started from.

    ``folder`` contains them as ``config.json`` and ``dtypes.json``, and the tokenizer.
    """

    folder: Path
    config: PretrainedConfig
    dtypes: Dtypes

    @property
    def usual_dtype(self) -> torch.dtype:
        """Most frequent dtype of the pretrained model's tensors."""
        return DTYPES[self.dtypes.usual]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, or ``usual_dtype`` if the model has no such tensor."""
        return DTYPES[self.dtypes.others.get(name, self.dtypes.usual)]

    def can_compute(self, described: HuggingFace) -> bool:
        """Return whether the pretrained model's class can compute a kind of attention.

        ``described`` is the Hugging Face class with which this kind of attention is exported.
        """
        return self.config.model_type in (described.model_type, *described.also)

    def write_config(self, recipe: Recipe, directory: Path) -> None:
        """Write ``config.json``, changed where the recipe differs from the pretrained model.

        ``generation_config.json`` is copied if the model has one.
        """
        if changed := changed_keys(self.config, recipe):
            config = type(self.config).from_dict(self.config.to_dict() | changed)
            write_config(config, directory)
        else:
            shutil.copyfile(self.folder / CONFIG_NAME, directory / CONFIG_NAME)
        generation = self.folder / GENERATION_CONFIG_NAME
        if generation.is_file():
            shutil.copyfile(generation, directory / GENERATION_CONFIG_NAME)


def keep_original(source: Source, folder: Path) -> None:
    """Copy a model's configuration and tokenizer into a new folder, and add ``dtypes.json``."""
    folder.mkdir()
    with explain_os_errors(f"cannot copy the files of {format_path(source.folder)}"):
        for name in (CONFIG_NAME, GENERATION_CONFIG_NAME):
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)
        copy_tokenizer(source.folder, folder)
        dtypes = {name: stored.dtype for name, stored in source.tensors.items()}
        usual = source.usual_dtype
        others = {name: dtype for name, dtype in dtypes.items() if dtype != usual}
        described = Dtypes.model_validate({"usual": usual, "others": others})
        (folder / DTYPES_NAME).write_text(described.model_dump_json(indent=1) + "\n")


def find_original(recipe: Recipe) -> Original | None:
    """Return the files of the pretrained model that a run started from.

    Return None if the recipe's tokenizer folder is not from ``diffmegatron import``.
    """
    folder = Path(recipe.data.tokenizer)
    if not (folder / DTYPES_NAME).is_file():
        return None
    return Original(folder, read_config(folder), read_json(folder / DTYPES_NAME, Dtypes))
