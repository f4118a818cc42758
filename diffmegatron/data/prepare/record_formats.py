"""How a record becomes text: plain documents, prompt and response, or a chat.

A document is a list of segments. A plain one has a single segment; those for supervised
fine-tuning alternate between text that the model reads (prompts) and text that it learns to write
(responses), beginning with the former. They are stored as the sequences of one Megatron document,
which is all that the loss mask needs.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diffmegatron.data.prepare.corpus_readers import Format, Record
from diffmegatron.data.tokenizers import CHAT_END, CHAT_START

Layout = Literal["text", "instruction", "chat", "template"]


class UnusableError(Exception):
    """Why one record is no document."""


_LISTED = 8


@dataclass(frozen=True)
class Fields:
    """Where the text of a record is.

    Attributes:
        layout: ``text`` (one field), ``instruction`` (prompt and response), ``chat`` (a list of
            messages with ``role`` and ``content``, written as ChatML) or ``template`` (such a list,
            written by the tokenizer's own chat template).
        text_field: of ``text``.
        prompt_field: of ``instruction``.
        response_field: of ``instruction``.
        messages_field: of ``chat`` and ``template``.
        id_field: names a record in the rejects file; None: its line does.
    """

    layout: Layout = "text"
    text_field: str = "text"
    prompt_field: str = "prompt"
    response_field: str = "response"
    messages_field: str = "messages"
    id_field: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        """The fields without which a record is no document."""
        return {
            "text": (self.text_field,),
            "instruction": (self.prompt_field, self.response_field),
            "chat": (self.messages_field,),
            "template": (self.messages_field,),
        }[self.layout]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a Parquet file that are read."""
        return self.required + ((self.id_field,) if self.id_field else ())


def parse(record: Record, format: Format, fields: Fields) -> dict[str, Any]:
    """The fields of a record.

    Raises:
        UnusableError: it is not UTF-8, not JSON, or lacks a field.
    """
    if isinstance(record.payload, dict):
        document = {name: _decode_nested(value) for name, value in record.payload.items()}
    else:
        text = _decode(record.payload)
        document = _parse_json(text) if format == "jsonl" else {fields.text_field: text}
    missing = [name for name in fields.required if document.get(name) is None]
    if missing:
        raise UnusableError(f"no field {missing[0]!r}{_only(document)}")
    return document


def segments(document: dict[str, Any], fields: Fields) -> list[str]:
    """The texts of a document: one, or read and learned ones in turn (see the module).

    Those of ``template`` need a tokenizer: :mod:`diffmegatron.data.prepare.chat_template`.

    Raises:
        UnusableError: a field is not of the layout's form.
    """
    if fields.layout == "chat":
        return _chat(document[fields.messages_field])
    texts = [document[name] for name in fields.required]
    for name, text in zip(fields.required, texts, strict=True):
        if not isinstance(text, str):
            raise UnusableError(f"field {name!r} is {type(text).__name__}, not a string")
    return texts


def _chat(messages: Any) -> list[str]:
    """ChatML; what the assistant says, and that it ends, is learned.

    ``diffmegatron.hf.chat_template`` has the same as a template of Hugging Face.
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
    """Return role and content of every message of a chat.

    Raises:
        UnusableError: it is no list of messages with strings, has none of the assistant, or holds
            a marker, which would be read as the end or the beginning of a message.
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
    """The fields that are there; a reader of Parquet takes no others than those asked for."""
    names = [repr(name) for name in document if document[name] is not None]
    listed = ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
    return f", only {listed}" if names else ""


def _decode(payload: bytes) -> str:
    try:
        return payload.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"not UTF-8 at byte {error.start}") from None


def _decode_nested(value: Any) -> Any:
    return _decode(value) if isinstance(value, bytes) else value
