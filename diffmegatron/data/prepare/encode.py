"""Convert a batch of raw records to token ids."""

import hashlib
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from diffmegatron.data.prepare.chat_template import ChatTemplate
from diffmegatron.data.prepare.corpus_readers import CorpusFile, CorpusRecord
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.prepare.record_formats import UnusableError, parse, segments
from diffmegatron.data.tokenizers import EncodeError, Tokenizer, load_tokenizer
from diffmegatron.files import printable, shorten

DIGEST_BYTES = 16
_ENDLESS = "the tokenizer takes too much CPU time for the text"
_SURROGATE = "the text has a lone surrogate, which is not a character"


def token_dtype(tokenizer: str) -> np.dtype:
    """Return Megatron's dtype for a tokenizer's ids (``DType.optimal_dtype``): uint16 or int32."""
    return np.dtype(np.uint16 if loaded(tokenizer).vocab_size < 65500 else np.int32)


class Reject(NamedTuple):
    """Record that cannot be used, with the reason."""

    file: str
    before: int  # byte at which reading began; above 0 only for a range of --part
    line: int  # line or row, counted from 1 at the byte ``before``
    id: str | None  # value of the field settings.id_field; None if not available
    reason: str

    def __str__(self) -> str:
        start = f" (counted from byte {self.before})" if self.before else ""
        return f"{self.file} line {self.line}{start}: {self.reason}"


@dataclass
class EncodedBatch:
    """Encoded documents; each is one sequence (plain text), or prompts and responses in turn."""

    tokens: np.ndarray  # uint16 or int32 [tokens]; each document ends with an end-of-document id
    lengths: np.ndarray  # int32 [sequences]: number of tokens, including end-of-document ids
    counts: np.ndarray  # int32 [documents]: number of sequences
    digests: list[bytes]  # 16-byte hash of each document's ids; [] unless settings.deduplicate
    rejects: list[Reject]
    empty: int  # number of records without text or with an empty last response
    text_bytes: int  # UTF-8 bytes of the encoded text


@lru_cache(maxsize=4)
def loaded(tokenizer: str) -> Tokenizer:
    """Return the tokenizer with this name or path; it is loaded once per process."""
    return load_tokenizer(tokenizer)


def encode_batch(
    records: list[tuple[CorpusFile, CorpusRecord]],
    settings: PrepareSettings,
    begin: Callable[[int, CorpusRecord], None] = lambda *_: None,
    endless: Collection[int] = (),
) -> EncodedBatch:
    """Decode, parse and tokenise records; each record that cannot be used becomes a reject.

    Args:
        records: records of input files.
        settings: settings of the corpus.
        begin: called with the number of a record, from 0, and the record before it is encoded.
        endless: numbers of records that are known to take too long, and become rejects.
    """
    tokenizer, dtype = loaded(settings.tokenizer), token_dtype(settings.tokenizer)
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    documents: list[np.ndarray] = []
    lengths: list[int] = []
    counts: list[int] = []
    rejects: list[Reject] = []
    empty = text_bytes = 0
    for number, (file, record) in enumerate(records):
        if number in endless:
            rejects.append(_reject(file, record, settings, _ENDLESS))
            continue
        begin(number, record)
        try:
            texts, ids = _encoded(file, record, settings)
        except (UnusableError, EncodeError) as error:
            rejects.append(_reject(file, record, settings, str(error)))
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
    """Return the chat template of the tokenizer with this name or path; loaded once per process."""
    return ChatTemplate(loaded(tokenizer))


def _encoded(
    file: CorpusFile, record: CorpusRecord, settings: PrepareSettings
) -> tuple[list[str], list[np.ndarray]]:
    """Return a record's texts and the ids of each text; two empty lists for a blank JSONL line."""
    is_blank = isinstance(record.payload, bytes) and not record.payload.strip()
    if is_blank and file.format == "jsonl" and record.problem is None:
        return [], []
    document = parse(record, file.format, settings)
    tokenizer = loaded(settings.tokenizer)
    try:
        if settings.layout == "template":
            text, ids = template(settings.tokenizer).encode(document[settings.messages_field])
            return [text], ids
        texts = segments(document, settings)
        encode = tokenizer.encode_chat if settings.layout == "chat" else tokenizer.encode
        return texts, [encode(text) for text in texts]
    except UnicodeEncodeError:
        raise UnusableError(_SURROGATE) from None


def _digest(document: np.ndarray) -> bytes:
    return hashlib.blake2b(document.data, digest_size=DIGEST_BYTES).digest()


def _reject(
    file: CorpusFile, record: CorpusRecord, settings: PrepareSettings, reason: str
) -> Reject:
    identity = None
    if settings.id_field is not None:
        with suppress(UnusableError):
            identity = parse(record, file.format, settings).get(settings.id_field)
    name = None if identity is None else str(identity)
    return Reject(printable(file.path), file.before, record.line, name, shorten(reason))


class Deduplicator:
    """Filter that drops documents whose token ids equal the ids of an earlier document.

    ``digests`` are the joined 16-byte hashes of the documents kept before an interruption.
    """

    def __init__(self, digests: bytes) -> None:
        starts = range(0, len(digests), DIGEST_BYTES)
        self._seen = {digests[start : start + DIGEST_BYTES] for start in starts}

    def drop_duplicates(self, batch: EncodedBatch) -> int:
        """Drop the duplicates from ``batch`` in place, and return their number."""
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
