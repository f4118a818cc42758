"""Convert a raw record to texts (segments): one plain text, or prompts and responses in turn.

Each segment becomes a sequence of a Megatron document. For fine-tuning, every second sequence of a
document is therefore a response.
"""

import json
from collections.abc import Sequence
from typing import Any

from diffmegatron.data.prepare.corpus_readers import CorpusRecord, Format
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.tokenizers import CHAT_END, CHAT_START


class UnusableError(Exception):
    """A record cannot become a document; the message is the reason."""


_LISTED = 8
# Editors and exports of Windows write this character at the beginning of UTF-8 files.
_BYTE_ORDER_MARK = "\ufeff"


def parse(record: CorpusRecord, format: Format, settings: PrepareSettings) -> dict[str, Any]:
    """Return the fields of a raw record, which must be UTF-8 and have all required fields."""
    if record.problem is not None:
        raise UnusableError(record.problem)
    if isinstance(record.payload, dict):
        document = {
            name: _decode(value) if isinstance(value, bytes) else value
            for name, value in record.payload.items()
        }
    else:
        text = _decode(record.payload).removeprefix(_BYTE_ORDER_MARK)
        document = _parse_json(text) if format == "jsonl" else {settings.text_field: text}
    missing = [name for name in settings.required_fields if document.get(name) is None]
    if missing:
        names = [repr(name) for name in document if document[name] is not None]
        listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
        raise UnusableError(f"no field {missing[0]!r}{f', only {listed}' if names else ''}")
    return document


def segments(document: dict[str, Any], settings: PrepareSettings) -> list[str]:
    """Return the segments of a document, for every layout except ``template``."""
    if settings.layout == "chat":
        return _chat(document[settings.messages_field])
    texts = [document[name] for name in settings.required_fields]
    for name, text in zip(settings.required_fields, texts, strict=True):
        if not isinstance(text, str):
            raise UnusableError(f"field {name!r} is {type(text).__name__}, not a string")
    return texts


def _chat(messages: Any) -> list[str]:
    """Return the prompts and responses of a chat in turn, in the ChatML format.

    A response is the content and the end marker of an assistant's message. The start marker and the
    role of this message are the end of the prompt. Messages after the last response are dropped.
    ``diffmegatron.hf.chat_template`` renders the same format.
    """
    texts = [""]
    for role, content in checked_messages(messages, (CHAT_START, CHAT_END)):
        texts[-1] += f"{CHAT_START}{role}\n"
        if role == "assistant":
            texts += [f"{content}{CHAT_END}", "\n"]
        else:
            texts[-1] += f"{content}{CHAT_END}\n"
    return texts[:-1]


def checked_messages(messages: Any, markers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the role and the content of each message of a chat.

    Refuse a chat that lacks a response, or in which a message contains one of ``markers``.
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


def _decode(payload: bytes) -> str:
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"not UTF-8 at byte {error.start}") from None
