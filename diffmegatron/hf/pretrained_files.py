"""Files of a pretrained model: the tensors to import, and the files that exports keep.

``diffmegatron import`` copies config.json and the tokenizer into a folder, and adds dtypes.json. If
a recipe has this folder as ``data.tokenizer``, its exports reuse these files.
"""

import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_NAME, PretrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, file_size, format_path, read_json, shorten
from diffmegatron.hf.configuration import changed_keys, read_config, write_config
from diffmegatron.hf.kinds import HuggingFace, WeightRule
from diffmegatron.hf.tokenizer import copy_tokenizer

DTYPES_NAME = "dtypes.json"
_DtypeName = Literal["F16", "BF16", "F32"]
SAFETENSORS_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
# RoPE buffers that old files contain. They are not weights, and transformers ignores them too.
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Stored(NamedTuple):
    """Description of a tensor in a safetensors file; ``dtype`` is a name such as BF16."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class _Index(BaseModel):
    """Content of ``model.safetensors.index.json``: tensor name -> file name."""

    weight_map: dict[str, str]


class PretrainedTensors:
    """Tensors in a pretrained model's folder; the constructor reads only the files' headers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        index = read_weight_index(folder)
        for file in sorted(set(index.values())) if index else [SAFE_WEIGHTS_NAME]:
            for name, stored in _read_header(folder / file):
                if name in self.tensors:
                    raise UserError(
                        f"{format_path(stored.path)} and {self.tensors[name].path.name} both hold "
                        f"{shorten(name)}; each tensor must be in one file"
                    )
                self.tensors[name] = stored
        if not self.tensors:
            raise UserError(
                f"{format_path(folder / SAFE_WEIGHTS_NAME)} contains no tensor; copy it again"
            )
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].path.name != file:
                raise UserError(
                    f"{format_path(folder / file)} lacks {shorten(name)}, which "
                    f"{SAFE_WEIGHTS_INDEX_NAME} lists for it; copy both again"
                )

    @property
    def usual_dtype(self) -> str:
        """Name of the most frequent dtype, such as BF16."""
        return Counter(stored.dtype for stored in self.tensors.values()).most_common(1)[0][0]

    def check(self, rules: Iterable[WeightRule], *, tied: bool) -> None:
        """Check that the files contain exactly the tensors of the network in ``config.json``.

        RoPE buffers are ignored. If the embedding is also the output layer (``tied``), the files
        may contain both matrices, but these must be equal.
        """
        config, left = "config.json", set(self.tensors)
        for name, shape in (item for rule in rules for item in rule.theirs.items()):
            stored = self.tensors.get(name)
            if stored is None:
                raise UserError(
                    f"{format_path(self.folder)} has no tensor {name}, which its {config} requires"
                )
            if stored.shape != shape:
                raise UserError(
                    f"{format_path(stored.path)} has {name} with shape {list(stored.shape)}; "
                    f"{config} requires {list(shape)}"
                )
            if stored.dtype not in SAFETENSORS_DTYPES:
                raise UserError(
                    f"{format_path(stored.path)} has {name} in {stored.dtype}; only "
                    f"{', '.join(SAFETENSORS_DTYPES)} can be imported"
                )
            left.remove(name)
        copies = {_OUTPUT} if tied else set()
        if unknown := sorted(n for n in left - copies if not _BUFFER.fullmatch(n)):
            raise UserError(
                f"{format_path(self.tensors[unknown[0]].path)} has {shorten(unknown[0])}, which is "
                f"not a tensor of the model in {config}"
            )
        if left & copies and not torch.equal(self.read(_OUTPUT), self.read(_EMBEDDING)):
            raise UserError(
                f"{format_path(self.tensors[_OUTPUT].path)} has different {_OUTPUT} and "
                f"{_EMBEDDING}, and {config} ties them (tie_word_embeddings)"
            )

    def stream(self, rules: Iterable[WeightRule]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor's name and values in the order of ``rules``; refuse NaN and inf."""
        for name in (name for rule in rules for name in rule.theirs):
            tensor = self.read(name)
            if not tensor.isfinite().all():
                raise UserError(
                    f"{format_path(self.tensors[name].path)} has values in {name} that are not "
                    "finite; training cannot start from it"
                )
            yield name, tensor

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor in its stored dtype."""
        path = self.tensors[name].path
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None


def read_weight_index(folder: Path) -> Mapping[str, str]:
    """Return the index, tensor name -> file name; empty for a model in one file.

    Raises:
        UserError: the folder has no safetensors file, or its index names a file outside it.
    """
    if (folder / SAFE_WEIGHTS_NAME).exists():
        return {}
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    if not path.exists():
        pickles = sorted(found.name for kind in _PICKLES for found in folder.glob(kind))
        if pickles:
            raise UserError(
                f"{format_path(folder)} has its weights in {shorten(pickles[0])}, a pickle, which "
                "can run any program when it is read; convert them to safetensors"
            )
        raise UserError(
            f"{format_path(folder)} has neither {SAFE_WEIGHTS_NAME} nor "
            f"{SAFE_WEIGHTS_INDEX_NAME}; give the folder of a Hugging Face model"
        )
    index: dict[str, str] = read_json(path, _Index).weight_map
    bad = next((file for file in index.values() if not _PLAIN.fullmatch(file)), None)
    if bad is not None or not index:
        raise UserError(
            f"{format_path(path)} is damaged: its weight_map must have a .safetensors file of its "
            f"folder for each tensor{'' if bad is None else f', not {shorten(repr(bad))}'}"
        )
    return index


def _read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    file_size(path)  # raises a clear error if the file is missing or not regular
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - The file cannot be iterated.
                tensor = file.get_slice(name)
                yield name, Stored(path, tuple(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{format_path(path)} is not a complete safetensors file ({shorten(str(error))}); copy it "
        "again"
    )


class Dtypes(BaseModel):
    """Content of ``dtypes.json``; ``usual`` is the most frequent dtype of the tensors.

    ``others`` maps the name of each tensor with another dtype to that dtype.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    usual: _DtypeName
    others: dict[str, _DtypeName]


@dataclass(frozen=True)
class Original:
    """The pretrained model that a run started from; ``folder`` has its config and tokenizer."""

    folder: Path
    config: PretrainedConfig
    dtypes: Dtypes

    @property
    def usual_dtype(self) -> torch.dtype:
        """Most frequent dtype of the pretrained model's tensors."""
        return SAFETENSORS_DTYPES[self.dtypes.usual]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor, or ``usual_dtype`` if the model has no such tensor."""
        return SAFETENSORS_DTYPES[self.dtypes.others.get(name, self.dtypes.usual)]

    def can_compute(self, described: HuggingFace) -> bool:
        """Return whether the model's class computes the same network as ``described``."""
        return self.config.model_type in (described.model_type, *described.also)

    def write_config(self, recipe: Recipe, directory: Path) -> None:
        """Write ``config.json`` with the recipe's changes; copy ``generation_config.json``."""
        if changed := changed_keys(self.config, recipe):
            config = type(self.config).from_dict(self.config.to_dict() | changed)
            write_config(config, directory)
        else:
            shutil.copyfile(self.folder / CONFIG_NAME, directory / CONFIG_NAME)
        generation = self.folder / GENERATION_CONFIG_NAME
        if generation.is_file():
            shutil.copyfile(generation, directory / GENERATION_CONFIG_NAME)


def keep_original(source: PretrainedTensors, folder: Path) -> None:
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
    """Return the pretrained model whose files ``import`` copied to ``data.tokenizer``, or None."""
    folder = Path(recipe.data.tokenizer)
    if not (folder / DTYPES_NAME).is_file():
        return None
    return Original(folder, read_config(folder), read_json(folder / DTYPES_NAME, Dtypes))
