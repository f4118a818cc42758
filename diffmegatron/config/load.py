"""From YAML files and ``key=value`` overrides to a :class:`Recipe`.

A recipe may ``extends`` another (a path relative to itself, or a list of them, later ones win);
mappings merge key by key, everything else replaces. Every error names where the key came from.
A text that begins with ``./`` or ``../`` is a path from the file that says it, and made absolute.
"""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from diffmegatron.attention.variants import VARIANTS, Variant
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import STAGES, by_stage, check_follows, read_stages
from diffmegatron.config.yaml_documents import MAX_BYTES, MAX_DEPTH, dump_yaml, parse_yaml
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_text, shown
from diffmegatron.own_code import import_of_recipe, require_imported

COMMAND_LINE = "the command line"
# Files that a recipe is made of, one counted as often as it is extended.
MAX_FILES = 32

# What files say, merged, and per dotted key the file that said it. Nothing of it is ever changed:
# files and aliases share their parts.
Values = dict[str, Any]
Origins = dict[str, str]


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, to_plan: bool = False
) -> Recipe:
    """Read, merge and check a recipe.

    Args:
        path: YAML file.
        overrides: ``section.key=value`` strings; the value is read as YAML, ``./`` in it from the
            working directory.
        to_plan: files that other commands have yet to write may be missing.

    Raises:
        UserError: a file cannot be read or has stages, a key is unknown, or a value does not fit.
    """
    name = shown(Path(path))
    values, origins = _Files().read(Path(path))
    if "stages" in values:
        raise UserError(f"{name} has stages, each a recipe; give it to load_stages")
    return _validate(*_overridden(values, origins, overrides, to_plan), name)


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), *, to_plan: bool = False
) -> tuple[Recipe, ...]:
    """Read a recipe that may be a list of stages, each a run that starts with the last's weights.

    Under ``stages`` are mappings of a ``name``, of ``start_from`` where that is another stage than
    the one before, and whatever a stage changes of the recipe around them; ``run_dir`` becomes
    ``run_dir/name`` and ``checkpoint.start_from`` the ``run_dir`` of the stage that it starts with.
    An override ``stages.name.key=value`` holds for that stage, any other for every stage that has
    none of its own; ``to_plan`` is that of :func:`load_recipe`.

    Returns:
        The stages in order; of a recipe without ``stages``, the recipe.

    Raises:
        UserError: as :func:`load_recipe`, a stage has no name of its own, or it cannot start with
            the weights of the one before.
    """
    path = Path(path)
    values, origins = _Files().read(path)
    shared = {key: value for key, value in values.items() if key != "stages"}
    if shared == values:
        if first := next((each for each in overrides if each.startswith(STAGES)), None):
            raise UserError(f"override {clipped(first)!r} is of a stage; {shown(path)} has none")
        return (_validate(*_overridden(values, origins, overrides, to_plan), shown(path)),)
    stages = read_stages(values["stages"], shown(path))
    own_overrides = by_stage(overrides, stages, shown(path))
    recipes: dict[str, Recipe] = {}
    for name, stage in stages.items():
        origin = f"{shown(path)}, stage {name!r}"
        own = origins | dict.fromkeys(_dotted_keys(stage.changes), origin)
        changed = _merged(shared, stage.changes)
        changed, own = _overridden(changed, own, own_overrides[name], to_plan)
        before = None if stage.start_from is None else recipes[stage.start_from]
        recipe = _validate(_placed(changed, name, before), own, shown(path), origin)
        if before is not None:
            check_follows(before, before.run_dir, recipe, origin)
        recipes[name] = recipe
    return tuple(recipes.values())


def recipe_files(path: Path) -> list[Path]:
    """The files that a recipe is made of, resolved: itself and all that it extends.

    Raises:
        UserError: one cannot be read, or they extend each other in a circle.
    """
    files = _Files()
    files.read(path)
    return files.paths


def load_resolved(path: Path) -> Recipe:
    """Read what :func:`dump_recipe` wrote: one file, which names no other.

    Raises:
        UserError: it cannot be read, extends another file, has stages, is no recipe, or names
            imports that nobody asked for in this process.
    """
    values = _read_mapping(path)
    for key in ("extends", "stages"):
        if key in values:
            raise UserError(f"{shown(path)} has {key!r}, which a resolved recipe has not")
    require_imported(values, shown(path))
    return _validate(values, {}, shown(path))


def check_recipe(values: Values, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe of values that no file holds.

    Args:
        values: of a recipe, key by key.
        name: of the values in a sentence.
        overrides: as :func:`load_recipe` takes them.

    Raises:
        UserError: as :func:`load_recipe`.
    """
    return _validate(*_overridden(values, {}, overrides), name)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that :func:`load_resolved` reads back to the same."""
    return dump_yaml(recipe.model_dump(mode="json"))


class _Files:
    """The files of one recipe, each of them parsed once."""

    def __init__(self) -> None:
        self._merged: dict[Path, tuple[Values, Origins] | None] = {}
        self._read = 0

    @property
    def paths(self) -> list[Path]:
        """Those that were read, resolved, each before what it extends."""
        return [*self._merged]

    def read(self, path: Path) -> tuple[Values, Origins]:
        """The values of a file, merged into those of the files that it extends."""
        self._read += 1
        if self._read > MAX_FILES:
            raise UserError(f"{shown(path)}: a recipe is made of {MAX_FILES} files at most")
        own = _read_mapping(path)
        file = path.resolve()
        if file not in self._merged:
            self._merged[file] = None
            self._merged[file] = self._extended(path, own)
        merged = self._merged[file]
        if merged is None:
            raise UserError(f"{shown(path)}: recipes extend each other in a circle; break it")
        return merged

    def _extended(self, path: Path, own: Values) -> tuple[Values, Origins]:
        merged: Values = {}
        origins: Origins = {}
        for parent in _parents(own.get("extends", []), path):
            inherited, inherited_origins = self.read(path.parent / parent)
            merged, origins = _merged(merged, inherited), origins | inherited_origins
        own = {key: value for key, value in own.items() if key != "extends"}
        own = _anchored(own, path.parent)
        return _merged(merged, own), origins | dict.fromkeys(_dotted_keys(own), shown(path))


def _read_mapping(path: Path) -> Values:
    values = parse_yaml(read_text(path, max_bytes=MAX_BYTES), shown(path))
    if not isinstance(values, dict):
        raise UserError(f"{shown(path)} must be a mapping of sections, not {type(values).__name__}")
    return values


def _parents(extends: Any, path: Path) -> list[str]:
    parents = [extends] if isinstance(extends, str) else extends
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(
            f"{shown(path)}: extends is {clipped(repr(extends))}; it takes a path or a list of "
            "paths"
        )
    return parents


def _anchored(value: Any, folder: Path) -> Any:
    """A value whose texts that begin with ``./`` or ``../`` are paths from ``folder``.

    Absolute, so that the resolved recipe means the same wherever it lies and is read.
    """
    if isinstance(value, dict):
        return {key: _anchored(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_anchored(each, folder) for each in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return os.path.normpath(folder.resolve() / value)
    return value


def _merged(below: Values, above: Values) -> Values:
    """``below`` with what ``above`` says, mapping by mapping; neither is changed."""
    both = dict(below)
    for key, value in above.items():
        is_mapping = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = _merged(both[key], value) if is_mapping else value
    return both


def _dotted_keys(values: Values, prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += _dotted_keys(value, f"{prefix}{key}.")
    return keys


def _overridden(
    values: Values, origins: Origins, overrides: Sequence[str], to_plan: bool = False
) -> tuple[Values, Origins]:
    """Values with what the command line says, and where each came from then."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {clipped(override)!r} is not of the form section.key=value")
        nested = parse_yaml(text, f"the value of override {clipped(override)!r}")
        nested = _anchored(nested, Path())
        parts = key.split(".")
        if len(parts) > MAX_DEPTH:
            raise UserError(f"override {clipped(override)!r} names no key: it has too many dots")
        for part in reversed(parts):
            nested = {part: nested}
        values = _merged(values, nested)
        origins = origins | dict.fromkeys(_dotted_keys(nested), COMMAND_LINE)
    return _with_files(import_of_recipe(values), to_plan), origins


def _with_files(values: Values, to_plan: bool) -> Values:
    """Values with what the files hold that the section of attention names."""
    model = values.get("model")
    attention = model.get("attention") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(attention, dict):
        return values
    kind = attention.get("kind")
    if not isinstance(kind, str) or kind not in VARIANTS:
        return values
    # The Transformer of the pair needs no file of the kind that it replaces.
    may_be_missing = to_plan or model.get("baseline") is True
    read = VARIANTS[kind].with_files(attention, may_be_missing=may_be_missing)
    return _merged(values, {"model": {"attention": dict(read)}})


def _placed(values: Values, name: str, before: Recipe | None) -> Values:
    """A stage's values with a folder of its own and the weights of the one that it starts with."""
    if isinstance(run_dir := values.get("run_dir"), str):
        values = values | {"run_dir": f"{run_dir}/{name}"}
    if before is not None and isinstance(values.get("checkpoint", {}), dict):
        values = _merged(values, {"checkpoint": {"start_from": before.run_dir}})
    return values


def _validate(values: Values, origins: Origins, path: str, stage: str = "") -> Recipe:
    """The recipe of some values; ``stage`` is the place of a stage in a sentence."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        # A mistyped key also leaves one missing; the mistyped one is what the user can see.
        errors = error.errors(include_url=False)
        first = min(errors, key=lambda each: each["type"] != "extra_forbidden")
        sentence = _sentence(first, values, origins, path)
        if stage and not sentence.startswith(stage):
            sentence = f"{stage}: {sentence.removeprefix(f'{path}: ')}"
        raise UserError(sentence) from None


def _sentence(error: Any, values: dict[str, Any], origins: dict[str, str], path: str) -> str:
    """One pydantic error in the words of the recipe: origin, key, value, what would be right."""
    key = ".".join(str(part) for part in error["loc"])
    origin = _origin(key, origins, path)
    if error["type"] == "extra_forbidden":
        if hint := _variants_key(error["loc"], values):
            return f"{origin}: unknown key {clipped(key)!r}; {hint}"
        known = sorted(_known_keys(error["loc"][:-1], values))
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"{origin}: unknown key {clipped(key)!r}; {hint}"
    if error["type"] == "missing":
        return f"{origin}: key {key!r} is missing; a recipe must give it"
    message = str(error.get("ctx", {}).get("error") or error["msg"])
    if error["type"] == "value_error":
        return f"{_origin_of_clash(message, origins) or origin}: {message}"
    value = clipped(repr(error["input"]))
    return f"{origin}: {clipped(key)} is {value}: {message[:1].lower()}{message[1:]}"


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


def _known_keys(location: tuple[str | int, ...], values: dict[str, Any]) -> set[str]:
    sections: list[type[BaseModel]] = [Recipe]
    for part in location:
        if isinstance(part, int):
            continue
        fields = (each.model_fields for each in sections)
        sections = [_section_type(each[part].annotation) for each in fields if part in each]
        if Variant in sections:
            sections = [VARIANTS[kind] for kind in _kinds(values)]
    return {key for each in sections for key in each.model_fields}


def _kinds(values: Values) -> list[str]:
    """Return the kinds of attention of a recipe's values, of one section or of a list."""
    attention = values["model"]["attention"]
    sections = attention if isinstance(attention, list) else [attention]
    return [each["kind"] for each in sections if isinstance(each, dict) and "kind" in each]


def _variants_key(location: tuple[str | int, ...], values: Values) -> str | None:
    """Where a key of a kind of attention belongs that is somewhere else in ``model``."""
    section, name = location[:-1], str(location[-1])
    if section not in (("model",), ("model", "attention"), ("model", "initialization")):
        return None
    key = f"model.attention.{name}"
    kinds = [kind for kind, variant in VARIANTS.items() if name in variant.model_fields]
    if not kinds:
        return None
    attention = values["model"].get("attention")
    own = attention.get("kind") if isinstance(attention, dict) else None
    if own in kinds or len(kinds) == len(VARIANTS):
        return None if "attention" in section else f"give {key}"
    its = "" if own is None else f"; the recipe's is {own}"
    return f"{key} is a key of kind {', '.join(kinds)}{its}"


def _section_type(annotation: Any) -> type[BaseModel]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(_section_type(inner) for inner in annotation.__args__ if inner is not Ellipsis)
