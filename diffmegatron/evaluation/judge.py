"""Judges of generated texts: a model in a folder, or behind an OpenAI-compatible URL."""

import ast
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from pydantic import BaseModel, Field
from typing_extensions import override

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Generation
from diffmegatron.evaluation.targets import find_targets
from diffmegatron.files import format_path, parse_json, shorten
from diffmegatron.hf.chat_template import load_exported

# Seconds before the first and the second repetition of a failed request.
_PAUSES = (1.0, 5.0)
_TOO_MANY_REQUESTS, _SERVER_ERRORS = 429, 500
_MAX_BYTES = 1 << 22
_CONCLUSION = re.compile(r"(?im)^[ \t*]*conclusion[ \t*]*:[ \t*]*(true|false)[ \t*.]*$")
_SPANS = re.compile(r"(?im)^[ \t*]*problematic spans[ \t*]*:[ \t*]*(\[.*\])[ \t*.]*$")


class Verdict(NamedTuple):
    """The verdict of a judge on a text that a model wrote about a document.

    ``true`` is whether the document supports the text; None if the judge's answer has no clear
    verdict. ``spans`` has the phrases of the text that the judge lists as unsupported.
    """

    true: bool | None
    spans: list[str]


def parse_verdict(answer: str) -> Verdict:
    """Return the verdict in a judge's answer.

    The verdict is clear if exactly one line is ``Conclusion: True`` or ``Conclusion: False``. The
    spans are the strings of the Python list in the last line ``Problematic spans: [...]``.
    """
    found = [each.lower() == "true" for each in _CONCLUSION.findall(answer)]
    spans = _SPANS.findall(answer)
    return Verdict(found[0] if len(found) == 1 else None, _strings(spans[-1]) if spans else [])


def _strings(text: str) -> list[str]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


class Judge(ABC):
    """A model that decides whether a document supports a text; it decodes without sampling."""

    name: str

    @abstractmethod
    def ask(self, question: str) -> str:
        """Return the answer to a question."""


@lru_cache(maxsize=1)
def open_judge(where: str, model: str, key: str, tokens: int, seconds: float) -> Judge:
    """Open the judge in a folder or behind a URL; the last opened judge is cached.

    Args:
        where: a Hugging Face folder, or a URL to which ``/chat/completions`` is appended.
        model: name of the model at the URL.
        key: name of the environment variable that may contain the API key of the URL.
        tokens: largest number of tokens of an answer.
        seconds: time limit of a request to the URL, until the last byte of its answer.
    """
    if where.startswith(("http://", "https://")):
        return _Endpoint(where, model, key, tokens, seconds)
    return _Folder(Path(where), tokens)


class _Folder(Judge):
    def __init__(self, path: Path, tokens: int) -> None:
        (target,) = find_targets([path], path)
        self._model, self._tokens = Model(target), tokens
        self.name = f"{target.name}-{target.fingerprint[:12]}"

    @override
    def ask(self, question: str) -> str:
        target = self._model.target
        ids = self._encode(question)
        if len(ids) + self._tokens > target.context:
            raise UserError(
                f"judge {target.name} has a context of {target.context:,.0f} tokens, and a "
                f"question has {len(ids):,} and its answer {self._tokens:,}; give a smaller "
                "hallucination.context or another judge"
            )
        ((_, answer),) = self._model.answers([Generation(ids, self._tokens)])
        if isinstance(answer, NotFiniteError):
            raise answer
        return target.tokenizer.decode(cast(list[int], answer))

    def _encode(self, question: str) -> list[int]:
        tokenizer, target = self._tokenizer, self._model.target
        if not tokenizer.chat_template:
            return [target.start_token, *target.encode(question)]
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        folder = self._model.target.folder
        try:
            return load_exported(folder)
        except Exception as error:  # transformers raises errors of any type here.
            raise UserError(
                f"{format_path(folder)} has no usable tokenizer: {shorten(str(error))}"
            ) from None


class _Message(BaseModel):
    content: str | None


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirects, because the API key may be sent only to the given URL."""

    def redirect_request(self, *_: object) -> None:
        return None


class _Endpoint(Judge):
    """A judge behind a URL with OpenAI's interface for chat completions; its temperature is 0."""

    def __init__(self, url: str, model: str, key: str, tokens: int, seconds: float) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or not parts.hostname:
            raise UserError(
                "hallucination.judge must have the form https://host/path, without a user and "
                f"without a query; put the key into the environment variable {key}"
            )
        if not model:
            raise UserError(
                f"hallucination.judge {shorten(url)} is a URL; also give "
                "hallucination.judge_model, the name of the model there"
            )
        secret = os.environ.get(key, "").strip()
        if not re.fullmatch(r"[\x21-\x7e]*", secret):
            raise UserError(f"environment variable {key} is not printable ASCII; set it to the key")
        self._url = url.rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json"}
        if secret:
            self._headers["Authorization"] = f"Bearer {secret}"
        self._body = {"model": model, "temperature": 0, "max_tokens": tokens}
        self._seconds = seconds
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.name = model

    @override
    def ask(self, question: str) -> str:
        body = self._body | {"messages": [{"role": "user", "content": question}]}
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), self._headers, method="POST"
        )
        for pause in (*_PAUSES, None):
            answer, problem, is_temporary = self._try(request)
            if answer is not None:
                return answer
            if pause is None or not is_temporary:
                break
            time.sleep(pause)
        raise UserError(
            f"judge {shorten(self._url)} {problem}; all texts and verdicts so far are stored, so "
            "run the same command again when the judge is available"
        )

    def _try(self, request: urllib.request.Request) -> tuple[str | None, str, bool]:
        """Send a request once; return (answer or None, problem, whether a repetition may help)."""
        try:
            content = _within(self._seconds, lambda: self._read(request))
        except urllib.error.HTTPError as error:
            error.close()
            is_temporary = error.code == _TOO_MANY_REQUESTS or error.code >= _SERVER_ERRORS
            return None, f"answers with HTTP status {error.code}", is_temporary
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", error)
            if isinstance(cause, TimeoutError):
                return None, f"does not answer within {self._seconds:g} seconds", True
            return None, f"cannot be reached ({shorten(str(cause))})", True
        try:
            found: _Completion = parse_json(content, _Completion, "its answer")
        except UserError:
            return None, "answers with something that is not a chat completion", False
        return found.choices[0].message.content or "", "", False

    def _read(self, request: urllib.request.Request) -> bytes:
        deadline = time.monotonic() + self._seconds
        pieces, left = [], _MAX_BYTES
        with self._opener.open(request, timeout=self._seconds) as response:
            while left and (piece := response.read1(left)):
                pieces.append(piece)
                left -= len(piece)
                if time.monotonic() > deadline:
                    raise TimeoutError
        return b"".join(pieces)


def _within(seconds: float, read: Callable[[], bytes]) -> bytes:
    """Run ``read`` in a thread, and return its result, or raise TimeoutError after ``seconds``.

    The timeout of a socket limits only the wait for the next bytes, so a slow stream never exceeds
    it. After a TimeoutError, the thread continues in the background.
    """
    found: Future[bytes] = Future()

    def run() -> None:
        try:
            found.set_result(read())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="judge", daemon=True).start()
    return found.result(timeout=seconds)
