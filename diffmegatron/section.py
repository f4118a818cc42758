"""Base class of the sections of a recipe, and the types of their values."""

import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

# This limit keeps products of sizes finite as floats.
MAX_SIZE = 2**31 - 1
MAX_COUNT = 2**62
# File systems accept names of at most 255 bytes. Leave space for endings such as ".rejects.jsonl".
_NAME_BYTES = 200
_PATH_BYTES = 512
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Section(BaseModel):
    """Base class of typed records such as the sections of a recipe; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_boolean_for_number(cls, value: Any, field: ValidationInfo) -> Any:
        """Refuse a boolean for a number, and a number for a boolean, which pydantic converts."""
        assert field.field_name is not None
        types = _types(cls, field.field_name)
        numbers = types & {int, float}
        # The sections inside a field check their own fields.
        if (bool in types) == bool(numbers):
            return value
        for each in _scalars(value):
            if type(each) is bool and bool not in types and numbers:
                raise PydanticCustomError("number", "give a number, not a boolean")
            if type(each) in (int, float) and bool in types and not numbers:
                raise PydanticCustomError("boolean", "give true or false")
        return value


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the values in a list or dictionary, and in those within it."""
    if isinstance(value, list | tuple | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _scalars(each)
    else:
        yield value


@cache
def _types(section: type[Section], name: str) -> frozenset[type]:
    """Return the types in the annotation of a section's field, such as int and None."""
    return frozenset(_inner_types(section.model_fields[name].annotation))


def _inner_types(annotation: Any) -> Iterator[type]:
    if get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    elif isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for each in get_args(annotation):
        yield from _inner_types(each)


def _check_path(text: str) -> str:
    problem = None
    if not text:
        problem = "it is empty; give a path"
    elif _NO_TEXT.search(text):
        problem = "a path must be text without control characters"
    elif len(text.encode()) > _PATH_BYTES:
        problem = f"a path may have at most {_PATH_BYTES} bytes"
    elif any(len(name.encode()) > _NAME_BYTES for name in text.split("/")):
        problem = f"a name within a path may have at most {_NAME_BYTES} bytes"
    if problem is not None:
        raise PydanticCustomError("path", "{problem}", {"problem": problem})
    return text


def divisors(number: int) -> list[int]:
    """Return all numbers that divide ``number``, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


FREE = "free"
"""Mark of a key that may differ in a run that starts from the weights of another run."""
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
"""Size of a tensor's dimension, or number of objects such as layers."""
SizeOrZero = Annotated[int, Field(ge=0, le=MAX_SIZE)]
"""Size that may also be 0."""
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""Number of steps or tokens of a run."""
CountOrZero = Annotated[int, Field(ge=0, lt=2**63)]
"""Number of files, bytes, documents or tokens, which may be 0."""
RankCount = Annotated[int, Field(ge=1, le=4096)]
"""Number of ranks along one kind of parallelism."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
PathText = Annotated[str, AfterValidator(_check_path)]
"""Path of a file or folder, which need not exist."""
