"""From YAML files and ``key=value`` overrides to a :class:`Recipe`.

A recipe may ``extends`` another (a path relative to itself, or a list of them, later ones win);
mappings merge key by key, everything else replaces. Every error names where the key came from.
"""

import copy
import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError

COMMAND_LINE = "the command line"


class _Loader(yaml.SafeLoader):
    """YAML 1.2's numbers and keys: PyYAML reads ``1e-6`` as a string, which nobody means.

    Of a key that stands twice it takes the last without a word, where the format has an error.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping each of whose keys stands once."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            # Merges (<<) may be several; what is no scalar the constructor refuses by itself.
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            if (key.tag, key.value) in seen:
                raise yaml.composer.ComposerError(
                    None, None, f"key {key.value!r} stands twice; keep one", key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, merge and check a recipe.

    Args:
        path: YAML file.
        overrides: ``section.key=value`` strings; the value is read as YAML.

    Raises:
        UserError: a file cannot be read, a key is unknown, or a value does not fit.
    """
    values, origins = _read_file(Path(path), ())
    for override in overrides:
        _apply_override(values, origins, override)
    return _validate(values, origins, str(path))


def load_stages(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Recipe, ...]:
    """Read a recipe that may be a list of stages, each a run that starts with the last's weights.

    Under ``stages`` stand mappings of a ``name`` and whatever a stage changes of the recipe around
    them; ``run_dir`` becomes ``run_dir/name`` and ``checkpoint.start_from`` the stage before.
    Overrides hold for every stage.

    Returns:
        The stages in order; of a recipe without ``stages``, the recipe.

    Raises:
        UserError: as :func:`load_recipe`, or a stage has no name of its own.
    """
    values, origins = _read_file(Path(path), ())
    stages = values.pop("stages", None)
    if stages is None:
        return (load_recipe(path, overrides),)
    recipes: list[Recipe] = []
    for name, changes in _named(stages, str(path)).items():
        merged, merged_origins = copy.deepcopy(values), dict(origins)
        _merge(merged, changes)
        merged_origins |= dict.fromkeys(_dotted_keys(changes), f"{path}, stage {name!r}")
        for override in overrides:
            _apply_override(merged, merged_origins, override)
        merged["run_dir"] = f"{merged.get('run_dir', 'runs')}/{name}"
        if recipes:
            _merge(merged, {"checkpoint": {"start_from": recipes[-1].run_dir}})
        recipes.append(_validate(merged, merged_origins, str(path)))
    return tuple(recipes)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that :func:`load_recipe` reads back to the same."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)


def _named(stages: Any, path: str) -> dict[str, dict[str, Any]]:
    """The stages' changes by name."""
    named: dict[str, dict[str, Any]] = {}
    listed: list[Any] = stages if isinstance(stages, list) else [stages]
    for stage in listed:
        changes = dict(stage) if isinstance(stage, dict) else {}
        name = changes.pop("name", None)
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name) or name in named:
            raise UserError(
                f"{path}: stages must be a list of mappings, each with a name of its own in "
                f"letters, digits, '_', '-' and '.'; {stage!r} is not"
            )
        named[name] = changes
    if not named:
        raise UserError(f"{path}: stages is empty; list one at least or leave it out")
    return named


def _read_file(path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged values of a file and, per dotted key, the file that set it."""
    if path.resolve() in chain:
        raise UserError(f"{path}: recipes extend each other in a circle; break it")
    values = _parse(path)
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for parent in _parents(values.pop("extends", []), path):
        inherited, inherited_origins = _read_file(path.parent / parent, (*chain, path.resolve()))
        _merge(merged, inherited)
        origins |= inherited_origins
    _merge(merged, values)
    origins |= dict.fromkeys(_dotted_keys(values), str(path))
    return merged, origins


def _parents(extends: Any, path: Path) -> list[str]:
    parents = [extends] if isinstance(extends, str) else extends
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: extends is {extends!r}; it takes a path or a list of paths")
    return parents


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read recipe {path}: {_reason(error)}") from None
    try:
        values = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} must be a mapping of sections, not {type(values).__name__}")
    return values


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def _merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _dotted_keys(values: dict[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += _dotted_keys(value, f"{prefix}{key}.")
    return keys


def _apply_override(values: dict[str, Any], origins: dict[str, str], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"override {override!r} is not of the form section.key=value")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise UserError(f"override {override!r}: {text!r} is not a YAML value") from None
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    _merge(values, nested)
    origins |= dict.fromkeys(_dotted_keys(nested), COMMAND_LINE)


def _validate(values: dict[str, Any], origins: dict[str, str], path: str) -> Recipe:
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        # A mistyped key also leaves one missing; the mistyped one is what the user can see.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
        raise UserError(_sentence(first, origins, path)) from None


def _sentence(error: Any, origins: dict[str, str], path: str) -> str:
    """One pydantic error in the words of the recipe: origin, key, value, what would be right."""
    key = ".".join(str(part) for part in error["loc"])
    origin = _origin(key, origins, path)
    if error["type"] == "extra_forbidden":
        known = sorted(_known_keys(error["loc"][:-1]))
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"{origin}: unknown key {key!r}; {hint}"
    if error["type"] == "missing":
        return f"{origin}: key {key!r} is missing; a recipe must give it"
    message = str(error.get("ctx", {}).get("error") or error["msg"])
    if error["type"] == "value_error":
        return f"{_origin_of_clash(message, origins) or origin}: {message}"
    return f"{origin}: {key} is {error['input']!r}: {message[:1].lower()}{message[1:]}"


def _origin(key: str, origins: dict[str, str], path: str) -> str:
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return path


def _origin_of_clash(message: str, origins: dict[str, str]) -> str:
    """Where the keys that a cross-check names came from; empty where it names none that was set."""
    named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message)
    return " and ".join(dict.fromkeys(origins[key] for key in named if key in origins))


def _known_keys(location: tuple[str | int, ...]) -> set[str]:
    section: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        section = _section_type(section.model_fields[part].annotation)
    return set(section.model_fields)


def _section_type(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_section_type(inner) for inner in annotation.__args__ if inner is not Ellipsis)
