"""Judges of generated texts, and their verdicts."""

import ast
import re
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.judge_endpoint import JudgeEndpoint
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Generation
from diffmegatron.evaluation.targets import find_targets
from diffmegatron.files import format_path, shorten
from diffmegatron.hf.chat_template import load_exported

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
    conclusions = [word.lower() == "true" for word in _CONCLUSION.findall(answer)]
    spans = _SPANS.findall(answer)
    return Verdict(
        conclusions[0] if len(conclusions) == 1 else None, _strings(spans[-1]) if spans else []
    )


def _strings(text: str) -> list[str]:
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


class Judge(Protocol):
    """A model that decides whether a document supports a text; it decodes without sampling."""

    name: str

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
        return JudgeEndpoint(where, model, key, tokens, seconds)
    return _JudgeFolder(Path(where), tokens)


class _JudgeFolder:
    def __init__(self, path: Path, tokens: int) -> None:
        (target,) = find_targets([path], path)
        self._model, self._tokens = Model(target), tokens
        self.name = f"{target.name}-{target.fingerprint[:12]}"

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
