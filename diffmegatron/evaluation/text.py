"""Texts that suites read: of files, folders or prepared corpora."""

import hashlib
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
from diffmegatron.files import shown

# The setting ``characters`` of suites that cut documents into windows.
CHARACTERS = Field(
    default=None,
    description="a longer document ends there; by default 20,000 or 8 per token of the context",
)
_MAX_BYTES = 1 << 28
_SETTINGS = PrepareSettings()


def named_paths(options: tuple[str, ...]) -> dict[str, Path]:
    """``NAME=PATH`` or ``PATH``, whose name is that of the file without its ending.

    Raises:
        UserError: two have one name.
    """
    found: dict[str, Path] = {}
    for option in options:
        name, equals, path = option.partition("=")
        name, where = (name, Path(path)) if equals else (Path(option).stem, Path(option))
        if name in found:
            raise UserError(
                f"two sources are called {name!r}: {shown(found[name])} and {shown(where)}; give "
                "one as NAME=PATH"
            )
        found[name] = where
    return found


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a source that are not empty, in order.

    Args:
        path: JSONL (.gz, .zst) or Parquet with a field ``text``, a text file, which is one
            document, a folder of these, or the PREFIX of a prepared corpus.

    Raises:
        UserError: it cannot be read, or a record has no text.
    """
    texts = _of_corpus(path) if manifest_path(path).exists() else _of_files(path)
    return (text for text in texts if text)


def first_texts(
    options: tuple[str, ...], documents: int, characters: int
) -> Iterator[tuple[str, str]]:
    """The sources' names and the first documents of each, of at most so many characters.

    Raises:
        UserError: as :func:`named_paths` and :func:`read_texts`.
    """
    for name, path in named_paths(options).items():
        for text in islice(read_texts(path), documents):
            yield name, text[:characters]


def default_characters(context: int) -> int:
    """Return how many characters of a document fill a window of ``context`` tokens.

    Tokens of common vocabularies hold 3 to 5 characters of a text on average; 8 is
    more than enough. The number is 20,000 at least.
    """
    return max(20_000, 8 * context)


def digest(texts: Iterator[str]) -> str:
    """Tells collections of documents apart."""
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)}:{text}".encode())
    return found.hexdigest()


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
                if record.problem:
                    raise UnusableError(record.problem)
                (text,) = segments(parse(record, file.format, _SETTINGS), _SETTINGS)
            except UnusableError as error:
                raise UserError(
                    f"{shown(file.path)} at line {record.line} is no document: {error}"
                ) from None
            yield text
