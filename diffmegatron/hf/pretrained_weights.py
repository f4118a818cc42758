"""The weights of a pretrained model's folder: safetensors files, read tensor by tensor."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from diffmegatron.attention.variants.hugging_face import WeightRule
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, file_size, read_json, shown

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
# Buffers that old files hold beside the weights; transformers too computes them itself.
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Stored(NamedTuple):
    """A tensor as the header of its file describes it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str


class _Index(BaseModel):
    """What we read of the index of several files."""

    weight_map: dict[str, str]


class Source:
    """The tensors of a folder, by the headers of its files.

    Attributes:
        folder: of the model.
        tensors: by name.

    Raises:
        UserError: there are no safetensors files, one of them is missing or cut short, or they are
            not those that the index lists.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        index = _read_index(folder)
        for file in sorted(set(index.values())) if index else [SAFE_WEIGHTS_NAME]:
            for name, stored in _read_header(folder / file):
                if name in self.tensors:
                    raise UserError(
                        f"{shown(stored.path)} and {self.tensors[name].path.name} both hold "
                        f"{clipped(name)}; each tensor must be in one file"
                    )
                self.tensors[name] = stored
        if not self.tensors:
            raise UserError(
                f"{shown(folder / SAFE_WEIGHTS_NAME)} has no tensor in it; copy it again"
            )
        for name, file in index.items():
            if name not in self.tensors or self.tensors[name].path.name != file:
                raise UserError(
                    f"{shown(folder / file)} lacks {clipped(name)}, which "
                    f"{SAFE_WEIGHTS_INDEX_NAME} says it holds"
                )

    @property
    def usual_dtype(self) -> str:
        """Of most tensors, as safetensors calls it."""
        return Counter(stored.dtype for stored in self.tensors.values()).most_common(1)[0][0]

    def check(self, rules: Iterable[WeightRule], *, tied: bool) -> None:
        """Compare with what the configuration makes of the model, by the headers alone.

        Args:
            rules: the weight table of the model.
            tied: the embedding is the output layer too, which the files may hold once more.

        Raises:
            UserError: a tensor is missing, of another shape, of a dtype that is no floating point
                number of 16 or 32 bits, or none of this model's.
        """
        config, left = "config.json", set(self.tensors)
        for name, shape in (item for rule in rules for item in rule.theirs.items()):
            stored = self.tensors.get(name)
            if stored is None:
                raise UserError(
                    f"{shown(self.folder)} has no tensor {name}, which its {config} asks for"
                )
            if stored.shape != shape:
                raise UserError(
                    f"{shown(stored.path)} has {name} in the shape {list(stored.shape)}; "
                    f"{config} makes it {list(shape)}"
                )
            if stored.dtype not in DTYPES:
                raise UserError(
                    f"{shown(stored.path)} has {name} in {stored.dtype}; weights of "
                    f"{', '.join(DTYPES)} can be imported"
                )
            left.remove(name)
        copies = {_OUTPUT} if tied else set()
        if unknown := sorted(n for n in left - copies if not _BUFFER.fullmatch(n)):
            raise UserError(
                f"{shown(self.tensors[unknown[0]].path)} has {clipped(unknown[0])}, which is no "
                f"tensor of the model that {config} describes"
            )
        if left & copies and not torch.equal(self.read(_OUTPUT), self.read(_EMBEDDING)):
            raise UserError(
                f"{shown(self.tensors[_OUTPUT].path)} has another {_OUTPUT} than {_EMBEDDING}, and "
                f"tie_word_embeddings in {config} makes them one"
            )

    def stream(self, rules: Iterable[WeightRule]) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of a weight table in its order, one at a time, in its own dtype.

        Raises:
            UserError: it cannot be read, or holds numbers that are not finite.
        """
        for name in (name for rule in rules for name in rule.theirs):
            tensor = self.read(name)
            if not tensor.isfinite().all():
                raise UserError(
                    f"{shown(self.tensors[name].path)} has numbers in {name} that are not finite; "
                    "no training goes on from it"
                )
            yield name, tensor

    def read(self, name: str) -> Tensor:
        """A tensor's values."""
        path = self.tensors[name].path
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, error) from None


def _read_index(folder: Path) -> Mapping[str, str]:
    """The file of every tensor where there are several; empty where all are in one.

    Raises:
        UserError: there is neither, or the index names what is no file of its folder.
    """
    if (folder / SAFE_WEIGHTS_NAME).exists():
        return {}
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    if not path.exists():
        raise _no_weights(folder)
    index: dict[str, str] = read_json(path, _Index).weight_map
    bad = next((file for file in index.values() if not _PLAIN.fullmatch(file)), None)
    if bad is not None or not index:
        raise UserError(
            f"{shown(path)} is damaged: its weight_map must give a .safetensors file of its folder "
            f"for each tensor{'' if bad is None else f', not {clipped(repr(bad))}'}"
        )
    return index


def _no_weights(folder: Path) -> UserError:
    pickles = sorted(path.name for kind in _PICKLES for path in folder.glob(kind))
    if pickles:
        return UserError(
            f"{shown(folder)} has its weights in {clipped(pickles[0])}, a pickle, which can run "
            "any program when it is read; convert them to safetensors"
        )
    return UserError(
        f"{shown(folder)} has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; give the "
        "folder of a Hugging Face model"
    )


def _read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    file_size(path)  # says it where there is none, or where it is no ordinary file
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_slice(name)
                yield name, Stored(path, tuple(tensor.get_shape()), tensor.get_dtype())
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{shown(path)} is no whole safetensors file ({clipped(str(error))}); copy it again"
    )
