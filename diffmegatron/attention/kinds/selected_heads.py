"""The selected heads of DEX: the recipe's ``selected_heads``, and the file of ``dex select``."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, GetPydanticSchema, SerializeAsAny
from pydantic_core import core_schema

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_text
from diffmegatron.section import Section, Size
from diffmegatron.validation import validated
from diffmegatron.yaml_documents import MAX_YAML_BYTES, parse_yaml

# Default share of each layer's heads that ``dex select`` selects. ``plan`` assumes this share while
# the file of ``dex select`` does not exist.
SHARE = 0.5
# Key of the validation context: whether the file of ``dex select`` may be missing.
MAY_BE_MISSING = "may_be_missing"
Heads = tuple[tuple[int, ...], ...]


class SelectedOn(Section):
    """The model on which ``dex select`` selected the heads.

    ``fingerprint`` is :meth:`diffmegatron.checkpoint.checkpoint_format.Checkpoint.fingerprint`.
    """

    num_layers: Size = Field(description="its layers")
    num_heads: Size = Field(description="its query heads")
    fingerprint: str = Field(description="hash of some of its weights")


class HeadsFile(Section):
    """Content of the file that ``diffmegatron dex select`` writes."""

    model: SelectedOn
    method: Literal["entropy", "gradient"]
    share: float = Field(ge=0, le=1)
    heads: Heads


@dataclass(frozen=True)
class Unselected:
    """Value of ``selected_heads`` while the file with the heads does not exist yet."""

    file: str

    def error(self) -> UserError:
        """Return the error of a command that needs the heads."""
        path = format_path(Path(self.file))
        return UserError(
            f"model.attention.selected_heads names {path}, which does not exist; write it with "
            f"'diffmegatron dex select MODEL --data PREFIX --out {path}'"
        )

    def assumption(self, num_heads: int) -> str:
        """Return the sentence for ``plan`` about the assumed number of selected heads."""
        return (
            f"{format_path(Path(self.file))}, the file of model.attention.selected_heads, is not "
            f"written yet: counted are {assumed_heads(num_heads)} of the {num_heads} heads of "
            f"every layer, a --share of {SHARE:g}"
        )


def _check_heads(value: Any, check: Callable[[Any], Heads]) -> Heads | Unselected:
    return value if isinstance(value, Unselected) else check(value)


# A union would report one error for each type, so validate with the schema of `Heads` alone.
SelectedHeads = Annotated[
    Heads | Unselected,
    GetPydanticSchema(
        lambda _, schema_of: core_schema.no_info_wrap_validator_function(
            _check_heads, schema_of(Heads)
        )
    ),
    SerializeAsAny(),
]


def assumed_heads(num_heads: int) -> int:
    """Return the number of selected heads per layer to assume while the file does not exist."""
    return max(1, round(SHARE * num_heads))


def read_selected(file: str, *, may_be_missing: bool) -> dict[str, Any]:
    """Read a file of ``dex select``; return the recipe's ``selected_heads`` and ``selected_on``.

    If the file is missing and ``may_be_missing`` is true, ``selected_heads`` is `Unselected`, and
    there is no ``selected_on``.
    """
    path = Path(file)
    if _is_missing(path):
        if not may_be_missing:
            raise Unselected(file).error()
        return {"selected_heads": Unselected(file)}
    content = parse_yaml(read_text(path, max_bytes=MAX_YAML_BYTES), format_path(path))
    name = f"{format_path(path)}, read as a file of 'diffmegatron dex select'"
    heads = validated(HeadsFile, content, name)
    if heads.model.num_layers != len(heads.heads):
        raise UserError(
            f"{format_path(path)} has heads of {len(heads.heads)} layers, and model.num_layers is "
            f"{heads.model.num_layers}; run 'diffmegatron dex select' again"
        )
    values = heads.model_dump(mode="json")
    return {"selected_heads": values["heads"], "selected_on": values["model"]}


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # The caller then reads the file, which reports these errors.
        return False
    return False
