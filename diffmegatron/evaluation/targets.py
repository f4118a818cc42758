"""Targets (models to evaluate): Hugging Face folders, or checkpoints to export to such folders."""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError
from transformers import CONFIG_NAME, PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from diffmegatron.attention.kinds import LayerKinds
from diffmegatron.checkpoint.checkpoint_manifest import MANIFEST, read_checkpoint_manifest
from diffmegatron.checkpoint.stage_folders import newest_checkpoint
from diffmegatron.data.index.corpus_manifest import hash_file
from diffmegatron.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_bytes, shorten
from diffmegatron.hf.configuration import load_config
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.hf.kinds import model_types, read_attention
from diffmegatron.hf.pretrained_files import read_weight_index
from diffmegatron.hf.tokenizer import SAMPLE, TOKENIZER_FILES
from diffmegatron.section import MAX_SIZE
from diffmegatron.validation import describe_error, first_error


@dataclass(frozen=True)
class Target:
    """A model to evaluate; ``checkpoint`` is None for a Hugging Face folder.

    ``exports`` is the folder for Hugging Face exports of checkpoints. If ``serving`` is true, these
    have the form that serving engines load.
    """

    name: str
    path: Path
    checkpoint: Path | None
    exports: Path
    serving: bool = field(default=False, kw_only=True)

    @cached_property
    def folder(self) -> Path:
        """Hugging Face folder of the model; the first access exports a checkpoint if needed."""
        if self.checkpoint is not None and not self.export.exists():
            export_checkpoint(self.checkpoint, self.export, serving=self.serving)
        return self.export

    @cached_property
    def export(self) -> Path:
        """Path of the Hugging Face folder; for a checkpoint, the folder may not exist yet."""
        if self.checkpoint is None:
            return self.path
        step = read_checkpoint_manifest(self.checkpoint).step
        form = "-serving" if self.serving else ""
        return self.exports / f"{self.name}-step_{step:08d}-{self.fingerprint[:12]}{form}"

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run that wrote the checkpoint; None for a Hugging Face folder."""
        # The checkpoint is RUN_DIR/checkpoints/step_...
        return None if self.checkpoint is None else self.checkpoint.resolve().parent.parent

    @cached_property
    def config(self) -> PretrainedConfig:
        """Configuration of the model."""
        return load_config(self.folder)

    @cached_property
    def tokenizer(self) -> HuggingFaceTokenizer:
        """Tokenizer in the Hugging Face folder of the model."""
        return HuggingFaceTokenizer(str(self.folder))

    @cached_property
    def start_token(self) -> int:
        """Id of the start token: ``bos_token_id``, or the end-of-document token if unset."""
        beginning = self._number("bos_token_id", 0)
        return self.tokenizer.end_of_document if beginning is None else beginning

    @cached_property
    def context(self) -> float:
        """Largest number of tokens of a text; infinite without ``max_position_embeddings``."""
        limit = self._number("max_position_embeddings", 1)
        return math.inf if limit is None else limit

    def _number(self, key: str, least: int) -> int | None:
        value = getattr(self.config, key, None)
        if value is not None and not (type(value) is int and least <= value <= MAX_SIZE):
            raise UserError(
                f"{format_path(self.folder / CONFIG_NAME)} has {key} {shorten(repr(value))}; it "
                f"must be a number from {least} to {MAX_SIZE}"
            )
        return value

    def check_vocabulary(self) -> None:
        """Check that the network has an embedding for each id of the tokenizer."""
        rows = self._number("vocab_size", 1)
        if rows is not None and self.tokenizer.vocab_size > rows:
            raise UserError(
                f"the tokenizer of {format_path(self.folder)} has ids up to "
                f"{self.tokenizer.vocab_size - 1}, and {CONFIG_NAME} has vocab_size {rows}; "
                "evaluate the model with the tokenizer that it was trained with"
            )

    @cached_property
    def attention(self) -> LayerKinds:
        """Attention of the model; access raises a UserError if it is unknown."""
        model_type, known = self.config.model_type, model_types()
        if model_type not in known:
            raise UserError(
                f"{format_path(self.path)} has model_type {shorten(repr(model_type))}, whose "
                f"attention is unknown; suites that read attention support {', '.join(known)}"
            )
        try:
            return read_attention(self.config.to_dict())
        except ValidationError as error:
            problem = describe_error(first_error(error), ())
        except (KeyError, TypeError, ArithmeticError) as error:
            problem = shorten(str(error))
        raise UserError(
            f"{format_path(self.folder / CONFIG_NAME)} does not describe attention: {problem}"
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all files on which answers depend: weights, configuration and tokenizer."""
        if self.checkpoint is not None:
            return hashlib.sha256(read_bytes(self.checkpoint / MANIFEST)).hexdigest()
        read_weight_index(self.folder)  # refuses weights outside the folder, which have no hash
        digest = hashlib.sha256(read_bytes(self.folder / CONFIG_NAME))
        patterns = ("*.safetensors", SAFE_WEIGHTS_INDEX_NAME, *TOKENIZER_FILES)
        for file in sorted({file for each in patterns for file in self.folder.glob(each)}):
            digest.update(f"{file.name}:{hash_file(file)}".encode())
        return digest.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens such as ``</s>`` count as plain text."""
        return self.tokenizer.encode(text).tolist()


def find_targets(paths: Sequence[Path], out: Path, *, serving: bool = False) -> list[Target]:
    """Return a target for each path: a Hugging Face folder, a checkpoint or a run_dir.

    A run_dir stands for its newest checkpoint. Checkpoints are exported into a folder below
    ``out``, the directory of the evaluation, with ``serving`` in the form for serving engines.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(
            f"a target is given twice: {', '.join(map(format_path, paths))}; give each once"
        )
    return [
        Target(name, path, _checkpoint(path), out / "exports", serving=serving)
        for name, path in zip(_names(paths), paths, strict=True)
    ]


def have_one_tokenizer(targets: Sequence[Target]) -> bool:
    """Return whether the tokenizers of all targets encode text alike."""
    first, *others = (target.tokenizer for target in targets)
    return all(encode_alike(first, each) for each in others)


def encode_alike(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers encode text alike.

    This is true if their hashes are equal, or if their vocabulary sizes and their ids of sample
    texts are equal.
    """
    return one.sha256 == other.sha256 or (
        one.vocab_size == other.vocab_size
        and all(one.encode(text).tolist() == other.encode(text).tolist() for text in SAMPLE)
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """Return distinct names from the last components of the paths: a/x, b/x -> a-x, b-x."""
    parts = [path.resolve().parts[1:] for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["-".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"targets {', '.join(map(format_path, paths))} share a name; rename one folder")


def _checkpoint(path: Path) -> Path | None:
    """Return a checkpoint: ``path``, or the newest in a run_dir; None for a Hugging Face folder."""
    if os.path.lexists(path / CONFIG_NAME):
        return None
    if os.path.lexists(path / MANIFEST):
        read_checkpoint_manifest(path)
        return path
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise UserError(
            f"{format_path(path)} is not a model; give a Hugging Face folder with a {CONFIG_NAME}, "
            "a checkpoint, or a run_dir with a checkpoint"
        )
    return checkpoint
