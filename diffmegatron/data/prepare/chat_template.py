"""Render chats with the template of a Hugging Face tokenizer, and find the assistant's responses.

If the template has blocks ``{% generation %}``, the responses are the texts within these blocks.

With any other template, the messages before a response are rendered separately, with
``add_generation_prompt``. The rendered chat must begin with this text. The response follows this
text. It ends after the first special token behind its content. Without such a token, it ends before
the next message.

Inference encodes only the text before a response. A chat is therefore rejected if the ids of the
whole chat do not begin with the ids of that text.
"""

import re
from datetime import date
from hashlib import sha256
from itertools import takewhile
from typing import Any

import numpy as np
from jinja2 import TemplateError

from diffmegatron.data.prepare.record_formats import UnusableError, checked_messages
from diffmegatron.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import shorten

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT = "assistant"
# Some templates render the current date. With a fixed date, a corpus depends only on its inputs.
_DAY = date(2024, 7, 26)
# Simple chat with which a template is tried before the corpus is read.
_PROBE = (
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": _ASSISTANT, "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": _ASSISTANT, "content": "Hello, it is 4."},
)


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
        added = self._tokenizer.added_tokens_decoder.values()
        self._special = tuple(token.content for token in added if token.special)
        try:
            self.encode(list(_PROBE))
        except UnusableError as error:
            raise UserError(
                f"the chat template of tokenizer {tokenizer.name!r} cannot be used: {error}"
            ) from None

    def encode(self, messages: Any) -> tuple[str, list[np.ndarray]]:
        """Return the rendered chat, and the uint32 ids of its prompts and responses in turn.

        The ids after the last response are left out. If the last response ends with an
        end-of-document token, this token is left out too. The caller, ``encode_batch`` in
        data/prepare/encode.py, appends one. A chat that cannot be used raises an UnusableError.
        """
        checked_messages(messages, self._special)
        try:
            text, responses = self._rendered(messages)
        except (TemplateError, TypeError, ValueError) as error:
            raise UnusableError(
                f"the chat template cannot render this chat: {shorten(str(error))}"
            ) from None
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
        if len(parts[-1]) and parts[-1][-1] == self._end:
            parts[-1] = parts[-1][:-1]
        return text, parts

    def _encoded(self, text: str, **options: Any) -> Any:
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
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, spans = render_jinja_template(
            [messages],
            chat_template=self._template,
            return_assistant_tokens_mask=True,
            strftime_now=_DAY.strftime,
            **self._tokenizer.special_tokens_map,
        )
        responses = [(start, end) for start, end in spans[0] if end > start]
        if not responses:
            raise UnusableError("the chat template marks no text of the assistant")
        return texts[0], responses

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=prompt, strftime_now=_DAY.strftime
        )
        return text

    def _response(self, text: str, messages: list[dict[str, Any]], number: int) -> tuple[int, int]:
        """Return the character range of ``messages[number]`` in the rendered chat ``text``."""
        before = self._text(messages[:number], prompt=True)
        as_last = self._text(messages[: number + 1])
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(text, as_last, strict=False))
        until = "".join(character for character, _ in shared)
        content = messages[number]["content"].strip()
        if not text.startswith(before) or content not in until[len(before) :]:
            raise UnusableError(
                f"the chat template renders message {number + 1} differently within the chat than "
                "at its end, and has no {% generation %}"
            )
        written = until.index(content, len(before)) + len(content)
        places = {token: until.find(token, written) for token in self._special}
        ends = [place + len(token) for token, place in places.items() if place >= 0]
        return len(before), min(ends, default=len(until))
