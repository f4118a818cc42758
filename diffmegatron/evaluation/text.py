"""Held-out text for suites (benchmarks), from files, folders or prepared corpora.

A source is the text at the path of one option ``--data [NAME=]PATH``.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from pydantic import Field

from diffmegatron.data.index.corpus_manifest import manifest_path
from diffmegatron.data.index.token_store import check_tokenizer, open_corpus
from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.prepare.record_formats import UnusableError, parse, segments
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.evaluation.suite import Suite, Window
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path
from diffmegatron.section import Count

_MAX_BYTES = 1 << 28
_SETTINGS = PrepareSettings()


class TextSuite(Suite):
    """Base class of suites on documents of held-out text."""

    data: tuple[str, ...] = Field(
        min_length=1, description="text that no target was trained on, as PATH or NAME=PATH"
    )
    documents: Count | None = Field(
        default=64, description="number of documents per source (null: all)"
    )


class WindowSuite(TextSuite):
    """Base class of suites on windows (pieces of limited length) of held-out documents."""

    characters: Count | None = Field(
        default=None,
        description="longer documents are cut; by default at 20,000 or 8 per token of the context",
    )
    context: Window = Field(default=2048, description="tokens of a window with the start token")

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield (name of the source, text) for each document, cut to at most ``characters``."""
        # Tokens have 3 to 5 characters on average, so 8 characters per token suffice.
        characters = self.characters or max(20_000, 8 * self.context)
        return first_texts(self.data, self.documents, characters)

    def windows(self, text: str, target: Target) -> list[list[int]]:
        """Split the ids of a text into windows of ``context - 1`` ids; the last may be shorter.

        The windows do not contain the start token that precedes them in the network.
        """
        return list(split(target.encode(text), self.context - 1))


def split(ids: list[int], length: int) -> Iterator[list[int]]:
    """Yield pieces of ``length`` ids; the last piece may be shorter."""
    return (ids[first : first + length] for first in range(0, len(ids), length))


def named_paths(options: tuple[str, ...]) -> dict[str, Path]:
    """Return the path of each source by its name.

    Example: ``("a=x/b.jsonl", "x/c.jsonl")`` has the sources ``a`` and ``c``.
    """
    found: dict[str, Path] = {}
    for option in options:
        name, equals, path = option.partition("=")
        name, where = (name, Path(path)) if equals else (Path(option).stem, Path(option))
        if name in found:
            raise UserError(
                f"two sources have the name {name!r}: {format_path(found[name])} and "
                f"{format_path(where)}; give one as NAME=PATH"
            )
        found[name] = where
    return found


def read_texts(path: Path) -> Iterator[str]:
    """Yield the non-empty documents of a source in order.

    ``path`` is a file, a folder of files, or the PREFIX of a prepared corpus (its path without
    ``.bin``). A row of a JSONL file (also .gz or .zst) or of a Parquet file is a document with a
    field ``text``. A text file is one document.
    """
    texts = _of_corpus(path) if manifest_path(path).exists() else _of_files(path)
    return (text for text in texts if text)


def first_texts(
    options: tuple[str, ...], documents: int | None, characters: int
) -> Iterator[tuple[str, str]]:
    """Yield (name of the source, text) for the first documents of each source.

    ``documents`` is the number of documents per source; None: all. A text is cut to ``characters``.
    """
    for name, path in named_paths(options).items():
        for text in islice(read_texts(path), documents):
            yield name, text[:characters]


def _of_corpus(prefix: Path) -> Iterator[str]:
    corpus = open_corpus(str(prefix))
    tokenizer = load_tokenizer(corpus.manifest.tokenizer.name)
    check_tokenizer(corpus, tokenizer)
    starts = corpus.offsets // corpus.tokens.itemsize
    for start, length in zip(starts, corpus.lengths, strict=True):
        yield tokenizer.decode(corpus.tokens[start : start + length - 1])


def _of_files(path: Path) -> Iterator[str]:
    for file in find_files([path], "*"):
        for record in read_records(file, _SETTINGS.columns, _MAX_BYTES):
            try:
                (text,) = segments(parse(record, file.format, _SETTINGS), _SETTINGS)
            except UnusableError as error:
                raise UserError(
                    f"{format_path(file.path)} at line {record.line} is not a document: {error}"
                ) from None
            yield text
