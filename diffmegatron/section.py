"""What every section of a recipe is made of: its base, and what sections share.

The bounds are far above what anybody runs. Within them every product of sizes is a finite number,
every count and seed one that 64 bits hold, and every name one that a file system takes.
"""

import math
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

MAX_SIZE = 2**31 - 1
MAX_COUNT = 2**62
# Endings such as ".cache" or ".rejects.jsonl" are put behind a name; file systems end at 255.
_NAME_BYTES = 200
_PATH_BYTES = 512
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class Section(BaseModel):
    """One typed, immutable section of a recipe; a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def _check_path(text: str) -> str:
    """Refuse what no file can be called."""
    problem = None
    if not text:
        problem = "give a path; this is empty"
    elif _NO_TEXT.search(text):
        problem = "a path must be text without control characters"
    elif len(text.encode()) > _PATH_BYTES:
        problem = f"a path may have {_PATH_BYTES} bytes"
    elif any(len(name.encode()) > _NAME_BYTES for name in text.split("/")):
        problem = f"a name within a path may have {_NAME_BYTES} bytes"
    if problem is not None:
        raise PydanticCustomError("path", "{problem}", {"problem": problem})
    return text


def divisors(number: int) -> list[int]:
    """All numbers that divide ``number``, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
"""Of a tensor, or how many of something are held at once."""
SizeOrNone = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""Steps or tokens of a run."""
Ranks = Annotated[int, Field(ge=1, le=4096)]
"""Along one kind of parallelism."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
PathText = Annotated[str, AfterValidator(_check_path)]
"""Of a file or folder that need not exist."""
