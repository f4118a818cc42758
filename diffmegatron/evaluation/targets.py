"""What is evaluated: a Hugging Face folder, or one of our checkpoints, exported on the way."""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError
from transformers import CONFIG_NAME, PretrainedConfig

from diffmegatron.attention.variants import Variant, model_types, of_model_type
from diffmegatron.checkpoint.checkpoint_manifest import MANIFEST, read_manifest
from diffmegatron.checkpoint.stage_folders import newest_checkpoint
from diffmegatron.data.index.corpus_manifest import hash_file
from diffmegatron.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_bytes, shown
from diffmegatron.hf.configuration import load_config
from diffmegatron.hf.export_checkpoint import export_checkpoint
from diffmegatron.hf.tokenizer import SAMPLE
from diffmegatron.section import MAX_SIZE

EXPORTS = "exports"


@dataclass(frozen=True)
class Target:
    """A model to evaluate.

    Attributes:
        name: in the report.
        path: as the user gave it.
        checkpoint: of ours; None of a Hugging Face folder.
        exports: where checkpoints are exported to.
    """

    name: str
    path: Path
    checkpoint: Path | None
    exports: Path

    @cached_property
    def folder(self) -> Path:
        """Of Hugging Face's files; a checkpoint is exported once, and kept for a restart.

        Raises:
            UserError: it cannot be exported.
        """
        if self.checkpoint is not None and not self.export.exists():
            export_checkpoint(self.checkpoint, self.export)
        return self.export

    @cached_property
    def export(self) -> Path:
        """Where Hugging Face's files are, or will be.

        Raises:
            UserError: it is no whole checkpoint.
        """
        if self.checkpoint is None:
            return self.path
        step = read_manifest(self.checkpoint).step
        return self.exports / f"{self.name}-step_{step:08d}-{self.fingerprint[:12]}"

    @property
    def run_dir(self) -> Path | None:
        """Of the run that it comes from; None of a Hugging Face folder."""
        # RUN_DIR/checkpoints/step_...
        return None if self.checkpoint is None else self.checkpoint.resolve().parent.parent

    @cached_property
    def config(self) -> PretrainedConfig:
        """Its configuration.

        Raises:
            UserError: as :func:`~diffmegatron.hf.configuration.load_config`.
        """
        return load_config(self.folder)

    @cached_property
    def tokenizer(self) -> HuggingFaceTokenizer:
        """Of its folder.

        Raises:
            UserError: there is none, or it is not a fast one.
        """
        return HuggingFaceTokenizer(str(self.folder))

    @cached_property
    def start(self) -> int:
        """The token that text begins with: its bos_token_id, else what ends its documents.

        Raises:
            UserError: the former is no token.
        """
        beginning = self._number("bos_token_id", 0)
        return self.tokenizer.end_of_document if beginning is None else beginning

    @cached_property
    def context(self) -> float:
        """Tokens of its longest text; infinite where its configuration names no limit.

        Raises:
            UserError: the limit is not a length.
        """
        limit = self._number("max_position_embeddings", 1)
        return math.inf if limit is None else limit

    def _number(self, key: str, least: int) -> int | None:
        value = getattr(self.config, key, None)
        if value is not None and not (isinstance(value, int) and least <= value <= MAX_SIZE):
            raise UserError(
                f"{shown(self.folder / CONFIG_NAME)} has {key} {clipped(repr(value))}; it must be "
                f"a number from {least} to {MAX_SIZE}"
            )
        return value

    def check_vocabulary(self) -> None:
        """Check that the network has a row for each id that the tokenizer can give.

        Raises:
            UserError: it has fewer.
        """
        rows = self._number("vocab_size", 1)
        if rows is not None and self.tokenizer.vocab_size > rows:
            raise UserError(
                f"the tokenizer of {shown(self.folder)} gives ids up to "
                f"{self.tokenizer.vocab_size - 1}, and {CONFIG_NAME} has vocab_size {rows}; "
                "evaluate the model with the tokenizer that it was trained with"
            )

    @property
    def variant(self) -> Variant:
        """Its kind of attention.

        Raises:
            UserError: it is not one of those that are known.
        """
        model_type = self.config.model_type
        kind = of_model_type(model_type)
        if kind is None:
            raise UserError(
                f"{shown(self.path)} is of model_type {clipped(repr(model_type))}, whose attention "
                f"is not known here; what looks into attention takes {', '.join(model_types())}"
            )
        try:
            return kind.from_hugging_face(self.config.to_dict())
        except (ValidationError, KeyError, TypeError, ArithmeticError) as error:
            raise UserError(
                f"{shown(self.folder / CONFIG_NAME)} does not describe attention: "
                f"{clipped(str(error))}"
            ) from None

    @cached_property
    def fingerprint(self) -> str:
        """Hash of its configuration and weights, all of whose bytes are read.

        Of a checkpoint, of its manifest, which has a checksum of every file.
        """
        if self.checkpoint is not None:
            return hashlib.sha256(read_bytes(self.checkpoint / MANIFEST)).hexdigest()
        found = hashlib.sha256(read_bytes(self.folder / CONFIG_NAME))
        for file in sorted(self.folder.glob("*.safetensors")):
            found.update(f"{file.name}:{hash_file(file)}".encode())
        return found.hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids without any before or after; text that looks like a special token is text."""
        return self.tokenizer.encode(text).tolist()


def find_targets(paths: Sequence[Path], out: Path) -> list[Target]:
    """The targets of a command line.

    Args:
        paths: Hugging Face folders, checkpoints, and runs, whose newest checkpoint it is then.
        out: of the evaluation; exports are kept under it for a restart.

    Raises:
        UserError: one is not a model, or is given twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError(f"a target is given twice: {', '.join(map(shown, paths))}; give each once")
    names = _names(paths)
    return [_found(path, name, out / EXPORTS) for path, name in zip(paths, names, strict=True)]


def have_one_tokenizer(targets: Sequence[Target]) -> bool:
    """Whether all give the same ids."""
    first, *others = (target.tokenizer for target in targets)
    return all(give_same_ids(first, each) for each in others)


def give_same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Whether two tokenizers are the same, or read a sample of all kinds of text alike."""
    return one.sha256 == other.sha256 or (
        one.vocab_size == other.vocab_size
        and all(one.encode(text).tolist() == other.encode(text).tolist() for text in SAMPLE)
    )


def _names(paths: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = [path.resolve().parts[1:] for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["-".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    raise UserError(f"targets {', '.join(map(shown, paths))} have one name; give them other ones")


def _found(path: Path, name: str, exports: Path) -> Target:
    if os.path.lexists(path / CONFIG_NAME):
        return Target(name, path, None, exports)
    if os.path.lexists(path / MANIFEST):
        read_manifest(path)
        return Target(name, path, path, exports)
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise UserError(
            f"{shown(path)} is no model: it has neither a {CONFIG_NAME}, as Hugging Face's folders "
            "do, nor is it a checkpoint or a run_dir with one"
        )
    return Target(name, path, checkpoint, exports)
