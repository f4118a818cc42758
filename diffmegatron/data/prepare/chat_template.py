"""Render chats with the template of a Hugging Face tokenizer, and find the assistant's responses.

If the template has blocks ``{% generation %}``, the responses are the texts within these blocks.

With any other template, the messages before a response are rendered separately, with
``add_generation_prompt``. The rendered chat must begin with this text. The response follows this
text. It ends after the first special token behind its content. Without such a token, it ends before
the next message. The end of the content is found by rendering the chat with a mark behind it,
because a template may write the same text elsewhere.

Inference encodes only the text before a response. A chat is therefore rejected if the ids of the
whole chat do not begin with the ids of that text.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from hashlib import sha256
from typing import Any

import numpy as np

from diffmegatron.data.prepare.record_formats import UnusableError, checked_messages
from diffmegatron.data.tokenizers import (
    EncodeError,
    HuggingFaceTokenizer,
    Tokenizer,
    encode_whole_texts,
    explain_library_errors,
)
from diffmegatron.errors import UserError
from diffmegatron.files import shorten

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT = "assistant"
# Some templates render the current date. With a fixed date, a corpus depends only on its inputs.
_DAY = date(2024, 7, 26)
# transformers replaces functions among a template's variables by a text since 5.23, so the function
# of the date is defined in the template itself, from a table of strftime's codes.
_DATE_CODES = {
    f"%{code}": _DAY.strftime(f"%{code}") for code in (*"aAwdbBmyYHIpMSjUWVGuFe", "-d", "-m")
}
_DATE_MACRO = """\
{%- macro strftime_now(format) -%}
{%- set date = namespace(text=format) -%}
{%- for code, value in date_codes.items() -%}
{%- set date.text = date.text.replace(code, value) -%}
{%- endfor -%}
{{- date.text -}}
{%- endmacro %}
"""
# Characters of Unicode's private use area.
_MARKS = tuple(map(chr, range(0xE000, 0xF900)))
# A template is a program, which may be endless. Rendering the longest chats takes seconds.
_CPU_SECONDS = 60.0
# Simple chat with which a template is tried before the corpus is read.
_PROBE = (
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": _ASSISTANT, "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": _ASSISTANT, "content": "Hello, it is 4."},
)


@contextmanager
def limited_time() -> Iterator[None]:
    """Raise a TimeoutError in the ``with`` block after a minute of this process's CPU time.

    Only the main thread can be interrupted, so another thread has no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise TimeoutError(f"it takes more than {_CPU_SECONDS:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, expire)
    # The timer repeats, because Python drops an exception that is raised in a finalizer.
    signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class ChatTemplate:
    """Chat template of a Hugging Face tokenizer; the constructor tries it with a simple chat."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"tokenizer {tokenizer.name!r} has no chat template; --layout template needs the "
                "folder of a Hugging Face tokenizer, and --layout chat works with any tokenizer"
            )
        self._end = tokenizer.end_of_document
        # AutoTokenizer may select a class that tokenizes differently from tokenizer.json.
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(
            tokenizer.folder, local_files_only=True
        )
        try:
            self._template: str = self._tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"tokenizer {tokenizer.name!r} has no chat template, neither in "
                "chat_template.jinja nor in tokenizer_config.json; use --layout chat for ChatML"
            ) from None
        self.sha256 = sha256(self._template.encode()).hexdigest()
        encode_whole_texts(self._tokenizer.backend_tokenizer)
        added = self._tokenizer.added_tokens_decoder
        self._special = tuple(token.content for token in added.values() if token.special)
        if max(added, default=0) >= tokenizer.vocab_size:
            raise UserError(
                f"tokenizer_config.json of tokenizer {tokenizer.name!r} adds the token "
                f"{shorten(repr(added[max(added)].content))} with the id {max(added)}, which "
                "tokenizer.json does not contain; save the tokenizer again with transformers"
            )
        try:
            self.encode(list(_PROBE))
        except (UnusableError, EncodeError) as error:
            raise UserError(
                f"the chat template of tokenizer {tokenizer.name!r} cannot be used: {error}"
            ) from None

    def encode(self, messages: Any) -> tuple[str, list[np.ndarray]]:
        """Return the rendered chat, and the uint32 ids of its prompts and responses in turn.

        The ids after the last response are left out. If the last response ends with an
        end-of-document token, perhaps with white space behind it, these are left out too. The
        caller, ``encode_batch`` in data/prepare/encode.py, appends one. A chat that cannot be used
        raises an UnusableError.
        """
        checked_messages(messages, self._special)
        text, responses = self._rendered(messages)
        encoding = self._encoded(text, return_offsets_mapping=True)
        ids = np.array(encoding["input_ids"], dtype=np.uint32)
        starts = np.array([start for start, _ in encoding["offset_mapping"]])
        parts, place = [], 0
        for start, end in responses:
            first = int(np.searchsorted(starts, start))
            last = max(first, int(np.searchsorted(starts, end)))
            prompt = self._encoded(text[:start])["input_ids"]
            if ids[:first].tolist() != prompt:
                raise UnusableError(
                    "a token of the chat template extends over the beginning of a response"
                )
            parts += [ids[place:first], ids[first:last]]
            place = last
        ends = np.flatnonzero(parts[-1] == self._end)
        if len(ends) and not self._tokenizer.decode(parts[-1][ends[-1] + 1 :]).strip():
            parts[-1] = parts[-1][: ends[-1]]
        return text, parts

    def _encoded(self, text: str, **options: Any) -> Any:
        with explain_library_errors():
            return self._tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _rendered(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a chat, and the character range of each response (end exclusive)."""
        if _GENERATION.search(self._template):
            return self._marked(messages)
        text = self._text(messages)
        responses = [
            self._response(text, messages, number)
            for number, message in enumerate(messages)
            if message["role"] == _ASSISTANT
        ]
        return text, responses

    def _marked(self, messages: list[dict[str, Any]]) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._render(messages, return_assistant_tokens_mask=True)
        responses = [(start, end) for start, end in spans if end > start]
        if not responses:
            raise UnusableError("the chat template marks no text of the assistant")
        return text, responses

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> tuple[str, Any]:
        """Return the text of a chat, and the ranges of its ``{% generation %}`` blocks.

        The ranges are only found with the option ``return_assistant_tokens_mask``.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with limited_time():
                texts, spans = render_jinja_template(
                    [messages],
                    chat_template=_DATE_MACRO + self._template,
                    date_codes=_DATE_CODES,
                    **options,
                    **self._tokenizer.special_tokens_map,
                )
        except Exception as error:  # A template is a program, which can raise any error.
            reason = shorten(str(error) or type(error).__name__)
            raise UnusableError(f"the chat template cannot render this chat: {reason}") from None
        return texts[0], spans[0] if spans else []

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        return self._render(messages, add_generation_prompt=prompt)[0]

    def _response(self, text: str, messages: list[dict[str, Any]], number: int) -> tuple[int, int]:
        """Return the character range of ``messages[number]`` in the rendered chat ``text``."""
        before = self._text(messages[:number], prompt=True)
        as_last = self._text(messages[: number + 1])
        mark = next(letter for letter in _MARKS if letter not in as_last)
        content = messages[number]["content"]
        written = len(content.rstrip())
        marked = f"{content[:written]}{mark}{content[written:]}"
        with_mark = self._text([*messages[:number], {**messages[number], "content": marked}])
        end = with_mark.find(mark)
        until = os.path.commonprefix([text, as_last])  # noqa: RUF071 (texts, not paths)
        if (
            not until.startswith(before)
            or not len(before) <= end <= len(until)
            or with_mark.replace(mark, "", 1) != as_last
        ):
            raise UnusableError(
                f"the chat template renders message {number + 1} differently within the chat than "
                "at its end, and has no {% generation %}"
            )
        places = {token: until.find(token, end) for token in self._special}
        ends = [place + len(token) for token, place in places.items() if place >= 0]
        return len(before), min(ends, default=len(until))
