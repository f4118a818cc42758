"""What a worker of ``prepare`` does: a batch of raw records becomes token ids."""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from diffmegatron.data.prepare.chat_template import ChatTemplate
from diffmegatron.data.prepare.corpus_readers import CorpusFile, Record
from diffmegatron.data.prepare.record_formats import Fields, UnusableError, parse, segments
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer
from diffmegatron.files import clipped, printable

DIGEST_BYTES = 16
_SURROGATE = "the text has a lone surrogate, which is no character"


@dataclass(frozen=True)
class EncodeSettings:
    """What a worker has to know; ``deduplicate`` asks for the digests of the documents."""

    tokenizer: str
    fields: Fields
    deduplicate: bool

    def dtype(self) -> np.dtype:
        """The narrowest type of Megatron's that holds every id (``DType.optimal_dtype``)."""
        return np.dtype(np.uint16 if loaded(self.tokenizer).vocab_size < 65500 else np.int32)


class Reject(NamedTuple):
    """A document that could not be used, and why.

    Attributes:
        file: its name as :func:`printable`.
        before: bytes of the file before the line from which lines are counted; 0: all are.
    """

    file: str
    before: int
    line: int
    id: str | None
    reason: str

    def to_json(self) -> bytes:
        """One line of the rejects file."""
        return json.dumps(self._asdict()).encode() + b"\n"

    def __str__(self) -> str:
        start = f" (counted from byte {self.before})" if self.before else ""
        return f"{self.file} line {self.line}{start}: {self.reason}"


@dataclass(frozen=True)
class Batch:
    """Consecutive records, each with its file."""

    records: list[tuple[CorpusFile, Record]]


@dataclass
class EncodedBatch:
    """Documents of one batch.

    Attributes:
        tokens: all ids ``[n]``; every document ends with the tokenizer's end-of-document id.
        lengths: int32 ``[sequences]``, that id counted in the last of each document.
        counts: int32 ``[documents]``, sequences of each.
        digests: 16 bytes per document, equal where the token ids are; only to deduplicate.
        rejects: the records that are not among them.
        empty: records without text; neither documents nor rejects.
        text_bytes: bytes of UTF-8 text that were encoded.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    counts: np.ndarray
    digests: list[bytes]
    rejects: list[Reject]
    empty: int
    text_bytes: int


@lru_cache(maxsize=4)
def loaded(tokenizer: str) -> Tokenizer:
    """The tokenizer of that name, loaded once per process."""
    return load_tokenizer(tokenizer)


def encode_batch(batch: Batch, settings: EncodeSettings) -> EncodedBatch:
    """Decode, parse and tokenise a batch; a record that cannot be used becomes a reject."""
    tokenizer, dtype = loaded(settings.tokenizer), settings.dtype()
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    documents: list[np.ndarray] = []
    lengths: list[int] = []
    counts: list[int] = []
    rejects: list[Reject] = []
    empty = text_bytes = 0
    for file, record in batch.records:
        try:
            texts, ids = _encoded(file, record, settings)
        except UnusableError as error:
            rejects.append(_reject(file, record, settings.fields, str(error)))
            continue
        if not ids or not len(ids[-1]):
            empty += 1
            continue
        document = np.concatenate([*ids, end], dtype=dtype, casting="unsafe")
        documents.append(document)
        lengths += [len(part) for part in ids]
        lengths[-1] += 1
        counts.append(len(ids))
        text_bytes += sum(len(text.encode()) for text in texts)
    return EncodedBatch(
        tokens=np.concatenate([np.empty(0, dtype), *documents]),
        lengths=np.array(lengths, dtype=np.int32),
        counts=np.array(counts, dtype=np.int32),
        digests=[_digest(document) for document in documents] if settings.deduplicate else [],
        rejects=rejects,
        empty=empty,
        text_bytes=text_bytes,
    )


@lru_cache(maxsize=4)
def template(tokenizer: str) -> ChatTemplate:
    """The chat template of the tokenizer of that name, loaded once per process."""
    return ChatTemplate(loaded(tokenizer))


def _encoded(
    file: CorpusFile, record: Record, settings: EncodeSettings
) -> tuple[list[str], list[np.ndarray]]:
    """The texts of a record, and the ids of its segments."""
    fields, tokenizer = settings.fields, loaded(settings.tokenizer)
    if fields.layout != "template":
        texts = _texts(file, record, fields)
        return texts, [_encode(tokenizer, text, fields) for text in texts]
    document = _document(file, record, fields)
    if document is None:
        return [], []
    try:
        text, ids = template(settings.tokenizer).encode(document[fields.messages_field])
        return [text], ids
    except UnicodeEncodeError:
        raise UnusableError(_SURROGATE) from None


def _texts(file: CorpusFile, record: Record, fields: Fields) -> list[str]:
    """The segments of a record; none for a blank line of JSONL."""
    document = _document(file, record, fields)
    return [] if document is None else segments(document, fields)


def _document(file: CorpusFile, record: Record, fields: Fields) -> dict[str, Any] | None:
    """The fields of a record; None for a blank line of JSONL."""
    if record.problem is not None:
        raise UnusableError(record.problem)
    if file.format == "jsonl" and isinstance(record.payload, bytes) and not record.payload.strip():
        return None
    return parse(record, file.format, fields)


def _encode(tokenizer: Tokenizer, text: str, fields: Fields) -> np.ndarray:
    try:
        return (tokenizer.encode_chat if fields.layout == "chat" else tokenizer.encode)(text)
    except UnicodeEncodeError:
        raise UnusableError(_SURROGATE) from None


def _digest(document: np.ndarray) -> bytes:
    return hashlib.blake2b(document.data, digest_size=DIGEST_BYTES).digest()


def _reject(file: CorpusFile, record: Record, fields: Fields, reason: str) -> Reject:
    identity = None
    if fields.id_field is not None and record.problem is None:
        try:
            identity = parse(record, file.format, fields).get(fields.id_field)
        except UnusableError:
            identity = None
    name = None if identity is None else str(identity)
    return Reject(printable(file.path), file.before, record.line, name, clipped(reason))


class Deduplicator:
    """Drops documents whose token ids have been seen; holds 16 bytes of hash for each one kept."""

    def __init__(self, digests: bytes) -> None:
        starts = range(0, len(digests), DIGEST_BYTES)
        self._seen = {digests[start : start + DIGEST_BYTES] for start in starts}

    def drop_duplicates(self, batch: EncodedBatch) -> int:
        """Drop them from ``batch`` in place; their number."""
        new = np.ones(len(batch.digests), dtype=bool)
        for number, digest in enumerate(batch.digests):
            new[number] = digest not in self._seen
            self._seen.add(digest)
        if new.all():
            return 0
        new_sequences = np.repeat(new, batch.counts)
        batch.tokens = batch.tokens[np.repeat(new_sequences, batch.lengths)]
        batch.lengths = batch.lengths[new_sequences]
        batch.counts = batch.counts[new]
        batch.digests = [digest for digest, kept in zip(batch.digests, new, strict=True) if kept]
        return int((~new).sum())
