"""Check values from the user against a pydantic model, and report the first mistake."""

import difflib
import re
from collections.abc import Collection
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from diffmegatron.errors import UserError
from diffmegatron.files import shorten

_Model = TypeVar("_Model", bound=BaseModel)


def validated(schema: type[_Model], values: Any, name: str) -> _Model:
    """Return values as a pydantic model; errors begin with ``name``, the source of the values."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise UserError(
            f"{name}: {describe_error(first_error(error), schema.model_fields)}"
        ) from None


def first_error(error: ValidationError) -> Any:
    """Return the error to report: an unknown key if there is one, otherwise the first error.

    A mistyped required key causes two errors, and only the unknown key shows the mistake.
    """
    errors = error.errors(include_url=False)
    return min(errors, key=lambda each: each["type"] != "extra_forbidden")


# Endings of numbers as people write them, and the powers of ten that they stand for.
_POWERS = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_WITH_ENDING = re.compile(r"([0-9.]+) ?([kmbgt])", re.IGNORECASE)


def describe_error(error: Any, known_keys: Collection[str]) -> str:
    """Return one pydantic error as text: the key, its value, and the correct form.

    For an unknown key, the text suggests the most similar of ``known_keys``, or lists them all.
    """
    key = shorten(".".join(map(str, error["loc"]))) or "the content"
    if error["type"] == "extra_forbidden":
        known = sorted(known_keys)
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"key {key!r} is missing; give it a value"
    message = str(error.get("ctx", {}).get("error") or error["msg"])
    if error["type"] == "value_error":
        return message
    if error["type"] == "string_type" and isinstance(error["input"], bool | int | float):
        kind = "boolean" if isinstance(error["input"], bool) else "number"
        message = f"quote it, because YAML reads it as a {kind}"
    if number := _WITH_ENDING.fullmatch(str(error["input"])):
        message += f"; write {number[1]}e{_POWERS[number[2].lower()]}"
    return f"{key} is {shorten(repr(error['input']))}: {message[:1].lower()}{message[1:]}"
