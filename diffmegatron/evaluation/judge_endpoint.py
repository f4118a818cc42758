"""Client of a judge behind a URL with OpenAI's interface for chat completions."""

import asyncio
import os
import re
import time
from types import ModuleType
from typing import Any

from pydantic import BaseModel, Field

from diffmegatron.errors import UserError
from diffmegatron.files import parse_json, shorten

# Seconds before the first and the second repetition of a failed request.
_PAUSES = (1.0, 5.0)
_SUCCESS, _TOO_MANY_REQUESTS, _SERVER_ERRORS = 200, 429, 500
_MAX_BYTES = 1 << 22


class _Message(BaseModel):
    content: str | None


class _Choice(BaseModel):
    message: _Message


class _Completion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)


class JudgeEndpoint:
    """A judge behind a URL; its temperature is 0.

    httpx2 follows no redirects by default, so the API key reaches only the given URL.
    """

    def __init__(self, url: str, model: str, key: str, tokens: int, seconds: float) -> None:
        self._httpx = _library()
        try:
            parts = self._httpx.URL(url)
        except self._httpx.InvalidURL:
            parts = self._httpx.URL()
        if parts.userinfo or parts.query or not parts.host:
            raise UserError(
                "hallucination.judge must have the form https://host/path, without a user and "
                f"without a query; put the key into the environment variable {key}"
            )
        try:
            # The client reads proxies and certificates from the environment.
            self._httpx.AsyncClient()
        except (ImportError, OSError, ValueError) as error:
            raise UserError(
                "hallucination.judge is a URL, and the environment's proxy or certificates cannot "
                f"be used: {shorten(str(error))}; correct the variables"
            ) from None
        if not model:
            raise UserError(
                f"hallucination.judge {shorten(url)} is a URL; also give "
                "hallucination.judge_model, the name of the model there"
            )
        secret = os.environ.get(key, "").strip()
        if not re.fullmatch(r"[\x21-\x7e]*", secret):
            raise UserError(f"environment variable {key} is not printable ASCII; set it to the key")
        self._url = url.rstrip("/") + "/chat/completions"
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._body = {"model": model, "temperature": 0, "max_tokens": tokens}
        self._seconds = seconds
        self.name = model

    def ask(self, question: str) -> str:
        """Return the answer to a question; repeat the request if a failure may be temporary."""
        body = self._body | {"messages": [{"role": "user", "content": question}]}
        for pause in (*_PAUSES, None):
            answer, problem, is_temporary = self._try(body)
            if answer is not None:
                return answer
            if pause is None or not is_temporary:
                break
            time.sleep(pause)
        raise UserError(
            f"judge {shorten(self._url)} {problem}; all texts and verdicts so far are stored, so "
            "run the same command again when the judge is available"
        )

    def _try(self, body: dict[str, Any]) -> tuple[str | None, str, bool]:
        """Send a request once; return (answer or None, problem, whether a repetition may help)."""
        from anyio.from_thread import start_blocking_portal

        try:
            # The portal runs an event loop in a thread, because a notebook's loop may run in this.
            with start_blocking_portal() as portal:
                status, content = portal.call(self._post, body)
        except TimeoutError:
            return None, f"does not answer within {self._seconds:g} seconds", True
        except self._httpx.HTTPError as error:
            return None, f"cannot be reached ({shorten(str(error))})", True
        if status != _SUCCESS:
            is_temporary = status == _TOO_MANY_REQUESTS or status >= _SERVER_ERRORS
            return None, f"answers with HTTP status {status}", is_temporary
        try:
            completion: _Completion = parse_json(content, _Completion, "its answer")
        except UserError:
            return None, "answers with something that is not a chat completion", False
        return completion.choices[0].message.content or "", "", False

    async def _post(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return the status and the first 4 MiB of the response.

        The time limits of httpx2 apply to each read, so a slow stream would never exceed them.
        ``asyncio.timeout`` limits the whole request.
        """
        client = self._httpx.AsyncClient(timeout=None)
        async with (
            asyncio.timeout(self._seconds),
            client,
            client.stream("POST", self._url, headers=self._headers, json=body) as response,
        ):
            content = b""
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > _MAX_BYTES:
                    break
            return response.status_code, content


def _library() -> ModuleType:
    try:
        import httpx2
    except ImportError:
        raise UserError(
            "a judge behind a URL needs httpx2, which is not installed; install the extra with "
            "pip install 'diffmegatron[evaluation]'"
        ) from None
    return httpx2
