"""Chats as the template of a Hugging Face tokenizer writes them, and what of them is learned.

A chat is rendered once and encoded as one text, as ``apply_chat_template`` does, so the ids are
those that a server of the model sends. What the assistant writes is found in that text:

- by ``{% generation %}`` where the template has it;
- otherwise by prefixes. The messages before a response, rendered with ``add_generation_prompt``,
  must be a prefix of the rendered chat. The response begins there, and ends with the first special
  token behind its content, or where the next message begins.

Either way the ids before a response must be those of the prompt encoded by itself, for these are
what the model is given when it writes. A chat of which this does not hold is refused.
"""

import re
from datetime import date
from hashlib import sha256
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError

from diffmegatron.data.prepare.record_formats import UnusableError, checked_messages
from diffmegatron.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import clipped

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT = "assistant"
# Some templates write the day on which they are rendered; a corpus depends on its inputs alone.
_DAY = date(2024, 7, 26)
_PROBE = (
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": _ASSISTANT, "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": _ASSISTANT, "content": "Hello, it is 4."},
)


class _Rendered(NamedTuple):
    """A chat as text, and the characters of it that are learned, from and up to."""

    text: str
    learned: list[tuple[int, int]]


class ChatTemplate:
    """The chat template of a tokenizer's folder.

    Attributes:
        sha256: hash of the template.

    Raises:
        UserError: the tokenizer has no template, or the responses of an ordinary chat cannot be
            told from the rest of what it writes.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        from transformers import PreTrainedTokenizerFast

        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"tokenizer {tokenizer.name!r} has no chat template; --layout template needs the "
                "folder of a Hugging Face tokenizer, and --layout chat takes any tokenizer"
            )
        self._end = tokenizer.end_of_document
        # Not AutoTokenizer: training takes tokenizer.json as it is.
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(
            tokenizer.folder, local_files_only=True
        )
        try:
            self._template: str = self._tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"tokenizer {tokenizer.name!r} has no chat template, neither in "
                "chat_template.jinja nor in tokenizer_config.json; --layout chat writes ChatML"
            ) from None
        self.sha256 = sha256(self._template.encode()).hexdigest()
        added = self._tokenizer.added_tokens_decoder.values()
        self._special = tuple(token.content for token in added if token.special)
        try:
            self.encode(list(_PROBE))
        except UnusableError as error:
            raise UserError(
                f"the chat template of tokenizer {tokenizer.name!r} cannot be learned from: {error}"
            ) from None

    def encode(self, messages: Any) -> tuple[str, list[np.ndarray]]:
        """Return the rendered chat, and the ids that are read and learned in turn.

        Args:
            messages: dictionaries with ``role`` and ``content``, one of the assistant among them.

        Returns:
            The text, and uint32 ids; the first are read, the last learned, and what follows the
            last response is left out, an end-of-document token at its end too.

        Raises:
            UnusableError: the chat is not of this form, or its responses cannot be found.
        """
        checked_messages(messages, self._special)
        rendered = self._rendered(messages)
        encoding = self._encoded(rendered.text, return_offsets_mapping=True)
        ids = np.array(encoding["input_ids"], dtype=np.uint32)
        starts = np.array([start for start, _ in encoding["offset_mapping"]])
        parts, place = [], 0
        for start, end in rendered.learned:
            first = int(np.searchsorted(starts, start))
            last = max(first, int(np.searchsorted(starts, end)))
            prompt = self._encoded(rendered.text[:start])["input_ids"]
            if ids[:first].tolist() != prompt:
                raise UnusableError(
                    "a token of the chat template lies across the beginning of a response"
                )
            parts += [ids[place:first], ids[first:last]]
            place = last
        if len(parts[-1]) and parts[-1][-1] == self._end:
            parts[-1] = parts[-1][:-1]
        return rendered.text, parts

    def _encoded(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, add_special_tokens=False, verbose=False, **options)

    def _rendered(self, messages: list[dict[str, Any]]) -> _Rendered:
        if _GENERATION.search(self._template):
            return self._marked(messages)
        text = self._text(messages)
        learned = [
            self._response(text, messages, number)
            for number, message in enumerate(messages)
            if message["role"] == _ASSISTANT
        ]
        return _Rendered(text, learned)

    def _marked(self, messages: list[dict[str, Any]]) -> _Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [messages],
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                strftime_now=_DAY.strftime,
                **self._tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise _not_written(error) from None
        learned = [(start, end) for start, end in spans[0] if end > start]
        if not learned:
            raise UnusableError("the chat template marks nothing of the assistant")
        return _Rendered(texts[0], learned)

    def _text(self, messages: list[dict[str, Any]], *, prompt: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=prompt,
                strftime_now=_DAY.strftime,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise _not_written(error) from None
        return text

    def _response(self, text: str, messages: list[dict[str, Any]], number: int) -> tuple[int, int]:
        """Return the characters of one response in the text of the whole chat."""
        before = self._text(messages[:number], prompt=True)
        as_last = self._text(messages[: number + 1])
        shared = takewhile(_are_equal, zip(text, as_last, strict=False))
        until = "".join(character for character, _ in shared)
        content = messages[number]["content"].strip()
        if not text.startswith(before) or content not in until[len(before) :]:
            raise UnusableError(
                f"the chat template writes message {number + 1} otherwise within the chat than "
                "when it is the last, and has no {% generation %}"
            )
        written = until.index(content, len(before)) + len(content)
        places = {token: until.find(token, written) for token in self._special}
        ends = [place + len(token) for token, place in places.items() if place >= 0]
        return len(before), min(ends, default=len(until))


def _are_equal(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]


def _not_written(error: Exception) -> UnusableError:
    return UnusableError(f"the chat template does not write this chat: {clipped(str(error))}")
