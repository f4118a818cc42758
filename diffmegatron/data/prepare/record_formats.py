"""Convert a raw record to text: a plain document, a prompt with its response, or a chat.

A document is a list of texts, called segments. A plain document has one segment. A document for
supervised fine-tuning consists of prompts (no loss) and responses (loss) in turn, and begins with a
prompt. Each segment is stored as one sequence of a Megatron document. Every second sequence is
therefore a response, which determines the loss mask.
"""

import json
from collections.abc import Sequence
from typing import Any

from diffmegatron.data.prepare.corpus_readers import Format, Record
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.tokenizers import CHAT_END, CHAT_START


class UnusableError(Exception):
    """A record cannot become a document; the message is the reason."""


_LISTED = 8


def parse(record: Record, format: Format, settings: PrepareSettings) -> dict[str, Any]:
    """Return the fields of a raw record as a dictionary from names to values.

    A record of a plain-text file has one field, ``settings.text_field``.

    Raises:
        UnusableError: the record is not UTF-8, is not a JSON object, or lacks a field that the
            layout requires (``settings.required_fields``).
    """
    if isinstance(record.payload, dict):
        document = {
            name: _decode(value) if isinstance(value, bytes) else value
            for name, value in record.payload.items()
        }
    else:
        text = _decode(record.payload)
        document = _parse_json(text) if format == "jsonl" else {settings.text_field: text}
    missing = [name for name in settings.required_fields if document.get(name) is None]
    if missing:
        raise UnusableError(f"no field {missing[0]!r}{_only(document)}")
    return document


def segments(document: dict[str, Any], settings: PrepareSettings) -> list[str]:
    """Return the segments of a document, for every layout except ``template``.

    The layout ``template`` needs a tokenizer, and is implemented in
    :mod:`diffmegatron.data.prepare.chat_template`.

    Raises:
        UnusableError: a field does not have the form that the layout requires.
    """
    if settings.layout == "chat":
        return _chat(document[settings.messages_field])
    texts = [document[name] for name in settings.required_fields]
    for name, text in zip(settings.required_fields, texts, strict=True):
        if not isinstance(text, str):
            raise UnusableError(f"field {name!r} is {type(text).__name__}, not a string")
    return texts


def _chat(messages: Any) -> list[str]:
    """Return the prompts and responses of a chat in turn, in the ChatML format.

    A response is the content of an assistant's message and the end marker. The start marker and the
    role of this message are the end of the prompt. The text after the last response is dropped. The
    Hugging Face template in ``diffmegatron.hf.chat_template`` renders the same format.
    """
    texts = [""]
    for role, content in checked_messages(messages, (CHAT_START, CHAT_END)):
        texts[-1] += f"{CHAT_START}{role}\n"
        if role == "assistant":
            texts += [f"{content}{CHAT_END}", "\n"]
        else:
            texts[-1] += f"{content}{CHAT_END}\n"
    return texts[: len(texts) - 1]


def checked_messages(messages: Any, markers: Sequence[str]) -> list[tuple[str, str]]:
    """Check the messages of a chat, and return the role and content of each message.

    Args:
        messages: value of the messages field.
        markers: texts that separate messages and must not occur in a message.

    Raises:
        UnusableError: the value is not a list of messages with the strings ``role`` and
            ``content``, no message is from the assistant, or a message contains a marker.
    """
    pairs = [_message(message) for message in messages] if isinstance(messages, list) else []
    for marker in markers:
        if any(marker in text for pair in pairs for text in pair):
            raise UnusableError(f"a message has {marker!r} in it, which separates messages")
    if "assistant" not in [role for role, _ in pairs]:
        raise UnusableError("a chat must be a list with a message of the assistant")
    return pairs


def _message(message: Any) -> tuple[str, str]:
    role = content = None
    if isinstance(message, dict):
        role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise UnusableError("a message must have the strings 'role' and 'content'")
    return role, content


def _parse_json(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"not JSON: {error}") from None
    if not isinstance(document, dict):
        kind = type(document).__name__
        raise UnusableError(f"JSON of type {kind}, not an object; a line must be one document")
    return document


def _only(document: dict[str, Any]) -> str:
    """Return the end of an error message: the names of the first 8 fields that are not None."""
    names = [repr(name) for name in document if document[name] is not None]
    listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return f", only {listed}" if names else ""


def _decode(payload: bytes) -> str:
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"not UTF-8 at byte {error.start}") from None
