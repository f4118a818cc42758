"""What a worker of ``prepare`` does: a batch of raw records becomes token ids."""

import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from diffmegatron.data.corpus import Format, Record
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class EncodeSettings:
    """What decides the token ids of a document; everything here is in the manifest."""

    tokenizer: str
    text_field: str

    def dtype(self) -> np.dtype:
        """The narrowest type of Megatron's that holds every id (``DType.optimal_dtype``)."""
        return np.dtype(np.uint16 if loaded(self.tokenizer).vocab_size < 65500 else np.int32)


class Reject(NamedTuple):
    """A document that could not be used, and why."""

    file: str
    line: int
    reason: str

    def to_json(self) -> bytes:
        """One line of the rejects file."""
        return json.dumps(self._asdict()).encode() + b"\n"


@dataclass(frozen=True)
class Batch:
    """Consecutive records of one file."""

    file: str
    format: Format
    records: list[Record]


@dataclass
class EncodedBatch:
    """Documents of one batch.

    Attributes:
        tokens: all ids ``[n]``, every document ended by the tokenizer's end-of-document id.
        lengths: int32 ``[documents]``, that id counted.
        rejects: the records that are not among them.
        empty: records whose text is empty; neither documents nor rejects.
        text_bytes: bytes of UTF-8 text that were encoded.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    rejects: list[Reject] = field(default_factory=list)
    empty: int = 0
    text_bytes: int = 0


class _UnusableError(Exception):
    """Why one record is no document."""


@lru_cache(maxsize=4)
def loaded(tokenizer: str) -> Tokenizer:
    """The tokenizer of that name, loaded once per process."""
    return load_tokenizer(tokenizer)


def encode_batch(batch: Batch, settings: EncodeSettings) -> EncodedBatch:
    """Decode, parse and tokenise a batch; a record that cannot be used becomes a reject."""
    tokenizer, dtype = loaded(settings.tokenizer), settings.dtype()
    end = np.array([tokenizer.end_of_document], dtype=dtype)
    pieces: list[np.ndarray] = [np.empty(0, dtype)]
    lengths: list[int] = []
    result = EncodedBatch(pieces[0], np.empty(0, np.int32))
    for record in batch.records:
        try:
            text = _text(record, batch.format, settings.text_field)
            ids = tokenizer.encode(text)
        except _UnusableError as error:
            result.rejects.append(Reject(batch.file, record.line, str(error)))
            continue
        except UnicodeEncodeError:
            result.rejects.append(Reject(batch.file, record.line, "text has a lone surrogate"))
            continue
        if not text:
            result.empty += 1
            continue
        pieces += [ids.astype(dtype), end]
        lengths.append(len(ids) + 1)
        result.text_bytes += len(text.encode())
    result.tokens = np.concatenate(pieces)
    result.lengths = np.array(lengths, dtype=np.int32)
    return result


def _text(record: Record, format: Format, text_field: str) -> str:
    if record.failed:
        raise _UnusableError(record.payload.decode(errors="replace"))
    try:
        payload = record.payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _UnusableError(f"not UTF-8 at byte {error.start}") from None
    if format != "jsonl":
        return payload
    try:
        document = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"not JSON: {error}") from None
    if not isinstance(document, dict) or text_field not in document:
        raise _UnusableError(f"no field {text_field!r}")
    text = document[text_field]
    if not isinstance(text, str):
        raise _UnusableError(f"field {text_field!r} is {type(text).__name__}, not a string")
    return text
