"""Read a :class:`Recipe` from YAML files and ``key=value`` overrides.

``extends`` names one or more other recipes, whose values are inherited. Mappings are merged key by
key. A recipe later in the list replaces values of an earlier one, and the recipe's own values
replace all inherited values. Paths in ``extends``, and values that begin with ``./`` or ``../``,
are relative to the folder of their file. Such a value in an override is relative to the working
directory.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from diffmegatron.attention.kinds import KINDS, LayerKinds
from diffmegatron.attention.kinds.layer_kinds import LAYERS
from diffmegatron.attention.kinds.selected_heads import MAY_BE_MISSING
from diffmegatron.config.model_config import SCALING_KINDS
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import STAGES, by_stage, check_can_start_from, read_stages
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, read_text, shorten
from diffmegatron.own_code import import_recipe_code, require_imported
from diffmegatron.validation import describe_error, first_error
from diffmegatron.yaml_documents import (
    MAX_DEPTH,
    MAX_YAML_BYTES,
    dump_yaml,
    parse_value,
    parse_yaml,
)

COMMAND_LINE = "the command line"
# Largest number of files of one recipe. A file counts once for each file that extends it.
MAX_FILES = 32

# Removed key -> reason for its removal. Stored recipes of older runs may still have the key.
REMOVED = {
    "data.reset_position_ids": "rotary embeddings depend only on the distance between tokens",
}

# Content of files. Merged values share nested dictionaries, so never modify them in place.
_Values = dict[str, Any]
# Dotted key -> the file, the stage or the command line that set it.
Origins = dict[str, str]


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, allow_missing_files: bool = False
) -> Recipe:
    """Read, merge and check a recipe.

    Args:
        overrides: ``section.key=value`` strings; :func:`parse_value` reads the value.
        allow_missing_files: whether files that ``model.attention`` names may be missing; ``plan``
            then uses an assumption in place of their content.

    Raises:
        UserError: a file cannot be read or has stages, a key is unknown, or a value does not fit.
    """
    name = format_path(Path(path))
    values, origins = _Files().read(Path(path))
    if "stages" in values:
        raise UserError(f"{name} has stages; read it with load_stages")
    reading = {MAY_BE_MISSING: allow_missing_files}
    return _validate(*_overridden(values, origins, overrides), name, reading=reading)


def load_stages(
    path: str | Path, overrides: Sequence[str] = (), *, allow_missing_files: bool = False
) -> tuple[Recipe, ...]:
    """Read a recipe, and return one recipe per stage, or the one recipe if it has no ``stages``.

    A stage is a training run that usually starts with the weights of an earlier stage. ``stages``
    is a list of mappings with these keys:

    - ``name``: the stage's ``run_dir`` becomes ``run_dir/name``.
    - ``start_from``: earlier stage whose ``run_dir`` becomes this stage's
      ``checkpoint.start_from``. The default is the preceding stage, or null in the first stage.
      Null leaves ``checkpoint.start_from`` unchanged.
    - any other key of a recipe: its value in this stage.

    The arguments are those of :func:`load_recipe`. An override ``stages.NAME.key=value`` changes
    only the stage NAME.

    Raises:
        UserError: a recipe is wrong, or a stage cannot start from its ``start_from``.
    """
    reading = {MAY_BE_MISSING: allow_missing_files}
    file = format_path(Path(path))
    values, origins = _Files().read(Path(path))
    shared = {key: value for key, value in values.items() if key != "stages"}
    if shared == values:
        if first := next((each for each in overrides if each.startswith(STAGES)), None):
            raise UserError(f"override {shorten(first)!r} changes a stage; {file} has no stages")
        return (_validate(*_overridden(values, origins, overrides), file, reading=reading),)
    stages = read_stages(values["stages"], file)
    own_overrides = by_stage(overrides, stages, file)
    recipes: dict[str, Recipe] = {}
    for name, stage in stages.items():
        origin = f"{file}, stage {name!r}"
        own = origins | dict.fromkeys(_dotted_keys(stage.changes), origin)
        changed = _merged(shared, stage.changes)
        changed, own = _overridden(changed, own, own_overrides[name])
        before = None if stage.start_from is None else recipes[stage.start_from]
        changed = _with_stage_paths(changed, name, before)
        recipe = _validate(changed, own, file, origin, reading=reading)
        if before is not None:
            check_can_start_from(before, before.run_dir, recipe, origin)
        recipes[name] = recipe
    return tuple(recipes.values())


def recipe_files(path: Path) -> list[Path]:
    """Return the absolute paths, with links resolved, of a recipe and all files that it extends."""
    files = _Files()
    files.read(path)
    return files.paths


def load_resolved(path: Path, run_dir: Path | None = None) -> Recipe:
    """Read a recipe that :func:`dump_recipe` wrote: one file without ``extends`` and ``stages``.

    ``run_dir`` is the present folder of the run. If the run was moved or copied, paths within the
    recorded ``run_dir``, such as the tokenizer of an imported model, lead into the present folder.
    """
    values = _parse_mapping(read_text(path, max_bytes=MAX_YAML_BYTES), path)
    for key in ("extends", "stages"):
        if key in values:
            raise UserError(
                f"{format_path(path)} has {key!r}, which a resolved recipe must not have"
            )
    require_imported(values, format_path(path))
    values = _without_idle_scaling(_without_removed_keys(values))
    recipe = _validate(values, {}, format_path(path))
    if run_dir is None or os.path.realpath(recipe.run_dir) == os.path.realpath(run_dir):
        return recipe
    moved = _with_moved_paths(values, f"{recipe.run_dir}/", run_dir)
    return _validate(moved, {}, format_path(path))


def _without_removed_keys(
    values: _Values, prefix: str = "", *, only_false: bool = False
) -> _Values:
    kept = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if name in REMOVED and (value is False or not only_false):
            continue
        is_section = isinstance(value, dict)
        kept[key] = (
            _without_removed_keys(value, f"{name}.", only_false=only_false) if is_section else value
        )
    return kept


def _without_idle_scaling(values: _Values) -> _Values:
    """Return values without keys of ``rope_scaling`` that its kind does not have.

    Earlier versions accepted and stored such keys, which had no effect.
    """
    model = values.get("model")
    scaling = model.get("rope_scaling") if isinstance(model, dict) else None
    if not isinstance(scaling, dict) or not isinstance(model, dict):
        return values
    kind = scaling.get("kind")
    kept = {k: value for k, value in scaling.items() if kind in SCALING_KINDS.get(k, (kind,))}
    return values | {"model": model | {"rope_scaling": kept}}


def check_recipe(values: _Values, name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return a recipe from values that are not in a file; error messages call them ``name``."""
    values, origins = _overridden(values, {}, overrides)
    return _validate(values, origins, name, reading={MAY_BE_MISSING: False})


def dump_recipe(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML, for :func:`load_resolved`."""
    return dump_yaml(recipe.model_dump(mode="json"))


class _Files:
    """Reader of the files of one recipe, which parses each file only once."""

    def __init__(self) -> None:
        self._merged: dict[Path, tuple[_Values, Origins] | None] = {}
        self._read = 0

    @property
    def paths(self) -> list[Path]:
        """Absolute paths of the files that were read, in the order of first reading."""
        return [*self._merged]

    def read(self, path: Path) -> tuple[_Values, Origins]:
        """Return the merged values of a file and all files that it extends, and their origins."""
        self._read += 1
        if self._read > MAX_FILES:
            raise UserError(f"{format_path(path)}: a recipe may have at most {MAX_FILES} files")
        # `resolve` raises other errors than UserError for some paths, so read the file first.
        text = read_text(path, max_bytes=MAX_YAML_BYTES)
        file = path.resolve()
        if file not in self._merged:
            self._merged[file] = None
            self._merged[file] = self._extended(path, _parse_mapping(text, path))
        merged = self._merged[file]
        if merged is None:
            raise UserError(
                f"{format_path(path)}: recipes extend each other in a circle; remove a link"
            )
        return merged

    def _extended(self, path: Path, own: _Values) -> tuple[_Values, Origins]:
        merged: _Values = {}
        origins: Origins = {}
        for parent in _parents(own.get("extends", []), path):
            inherited, inherited_origins = self.read(path.parent / parent)
            merged, origins = _merged(merged, inherited), origins | inherited_origins
        own = {key: value for key, value in own.items() if key != "extends"}
        # Recipes that earlier versions wrote contain each removed key with the value false.
        own = _without_removed_keys(own, only_false=True)
        own = _with_absolute_paths(own, path.parent)
        return _merged(merged, own), origins | dict.fromkeys(_dotted_keys(own), format_path(path))


def _parse_mapping(text: str, path: Path) -> _Values:
    values = parse_yaml(text, format_path(path))
    if not isinstance(values, dict):
        raise UserError(
            f"{format_path(path)} must be a mapping of sections, not {type(values).__name__}"
        )
    return values


def _parents(extends: Any, path: Path) -> list[str]:
    parents = [extends] if isinstance(extends, str) else extends
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(
            f"{format_path(path)}: extends is {shorten(repr(extends))}; give a path or a list of "
            "paths"
        )
    return parents


def _with_absolute_paths(value: Any, folder: Path) -> Any:
    """Replace texts that begin with ``./`` or ``../`` by absolute paths, relative to ``folder``."""
    if isinstance(value, dict):
        return {key: _with_absolute_paths(each, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_absolute_paths(each, folder) for each in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return os.path.normpath(folder.resolve() / value)
    return value


def _with_moved_paths(value: Any, recorded: str, folder: Path) -> Any:
    """Replace ``recorded`` at the beginning of texts by a folder that has such a file."""
    if isinstance(value, dict):
        return {key: _with_moved_paths(each, recorded, folder) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_moved_paths(each, recorded, folder) for each in value]
    if isinstance(value, str) and value.startswith(recorded):
        moved = folder / value.removeprefix(recorded)
        return str(moved) if os.path.lexists(moved) else value
    return value


def _merged(below: _Values, above: _Values) -> _Values:
    """Return ``below`` updated by ``above``, also in nested mappings; neither is modified."""
    both = dict(below)
    for key, value in above.items():
        is_mapping = isinstance(value, dict) and isinstance(both.get(key), dict)
        both[key] = _merged(both[key], value) if is_mapping else value
    return both


def _dotted_keys(values: _Values, prefix: str = "") -> list[str]:
    keys = []
    for key, value in values.items():
        keys.append(f"{prefix}{key}")
        if isinstance(value, dict):
            keys += _dotted_keys(value, f"{prefix}{key}.")
    return keys


def _overridden(
    values: _Values, origins: Origins, overrides: Sequence[str]
) -> tuple[_Values, Origins]:
    """Apply overrides, and import the user code that the recipe names."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {shorten(override)!r} is not of the form section.key=value")
        nested = parse_value(text, f"the value of override {shorten(override)!r}")
        nested = _with_absolute_paths(nested, Path())
        parts = key.split(".")
        if len(parts) > MAX_DEPTH:
            raise UserError(f"override {shorten(override)!r} has too many dots to be a key")
        for part in reversed(parts):
            nested = {part: nested}
        values = _merged(values, nested)
        origins = origins | dict.fromkeys(_dotted_keys(nested), COMMAND_LINE)
    return import_recipe_code(values), origins


def _with_stage_paths(values: _Values, name: str, before: Recipe | None) -> _Values:
    """Return a stage's values with its own ``run_dir`` and ``checkpoint.start_from``."""
    if isinstance(run_dir := values.get("run_dir"), str):
        values = values | {"run_dir": f"{run_dir}/{name}"}
    if before is not None and isinstance(values.get("checkpoint", {}), dict):
        values = _merged(values, {"checkpoint": {"start_from": before.run_dir}})
    return values


def _validate(
    values: _Values,
    origins: Origins,
    path: str,
    stage: str = "",
    *,
    reading: Mapping[str, bool] | None = None,
) -> Recipe:
    """Return the recipe; ``reading`` is the validation context with which kinds read files."""
    try:
        return Recipe.model_validate(values, context=reading)
    except ValidationError as error:
        sentence = _sentence(first_error(error), values, origins, path)
        if stage and not sentence.startswith(stage):
            sentence = f"{stage}: {sentence.removeprefix(f'{path}: ')}"
        raise UserError(sentence) from None


def _sentence(error: Any, values: dict[str, Any], origins: dict[str, str], path: str) -> str:
    """Describe a pydantic error in a sentence: the file, the key and the mistake."""
    key = ".".join(str(part) for part in error["loc"])
    origin = _origin(key, origins, path)
    if key in REMOVED:
        return f"{origin}: key {key!r} is not used any more, because {REMOVED[key]}; remove it"
    if error["type"] == "extra_forbidden":
        if hint := _misplaced_key(error["loc"], values):
            return f"{origin}: unknown key {shorten(key)!r}; {hint}"
        others = [each for each in _every_key() if each.endswith(f".{error['loc'][-1]}")]
        if others:
            nearest = min(others, key=lambda each: each.count("."))
            return f"{origin}: unknown key {shorten(key)!r}; did you mean {nearest!r}?"
        return f"{origin}: {describe_error(error, _known_keys(error['loc'][:-1], values))}"
    sentence = describe_error(error, ())
    if error["type"] == "string_type" and origins.get(key) == COMMAND_LINE:
        sentence += f"; in a shell, text in quotes is {key}='\"TEXT\"'"
    if error["type"] == "value_error":
        origin = _origin_of_clash(sentence, origins) or origin
    return f"{origin}: {sentence}"


def _origin(key: str, origins: dict[str, str], path: str) -> str:
    while key:
        if key in origins:
            return origins[key]
        key = key.rpartition(".")[0]
    return path


def _origin_of_clash(message: str, origins: dict[str, str]) -> str:
    """Return the origins of the keys in a message, joined by " and "; "" if none is known."""
    named = re.findall(r"[a-z_]+(?:\.[a-z_]+)+", message)
    return " and ".join(dict.fromkeys(origins[key] for key in named if key in origins))


def _known_keys(location: tuple[str | int, ...], values: dict[str, Any]) -> set[str]:
    sections: list[type[BaseModel]] = [Recipe]
    for part in location:
        if isinstance(part, int):
            continue
        fields = (each.model_fields for each in sections)
        inner = [_section_type(each[part].annotation) for each in fields if part in each]
        sections = [each for each in inner if each is not None]
        if LayerKinds in sections:
            sections = [KINDS[kind] for kind in _kinds(values)]
    return {key for each in sections for key in each.model_fields}


def _every_key(section: type[BaseModel] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a recipe; those of ``model.attention`` are the keys of all kinds."""
    sections = [*KINDS.values()] if section is LayerKinds else [section]
    fields = {name: field for each in sections for name, field in each.model_fields.items()}
    for name, field in fields.items():
        yield f"{prefix}{name}"
        inner = _section_type(field.annotation)
        # Lists of sections have keys with numbers, which this key cannot be.
        if inner is not None and get_origin(field.annotation) not in (tuple, list):
            yield from _every_key(inner, f"{prefix}{name}.")


def _kinds(values: _Values) -> list[str]:
    attention = values["model"]["attention"]
    sections = attention if isinstance(attention, list) else [attention]
    return [each["kind"] for each in sections if isinstance(each, dict) and "kind" in each]


def _misplaced_key(location: tuple[str | int, ...], values: _Values) -> str | None:
    """Return a hint for a misplaced key of ``model.attention``, or None."""
    section, name = location[:-1], str(location[-1])
    if section == ("model", "attention") and name == LAYERS:
        return "layers is a key of an entry of a list; write model.attention as a list"
    if section not in (("model",), ("model", "attention"), ("model", "initialization")):
        return None
    key = f"model.attention.{name}"
    kinds = [kind for kind, section in KINDS.items() if name in section.model_fields]
    if not kinds:
        return None
    attention = values["model"].get("attention")
    own = attention.get("kind") if isinstance(attention, dict) else None
    if own in kinds or len(kinds) == len(KINDS):
        return None if "attention" in section else f"give {key}"
    its = "" if own is None else f"; the recipe's is {own}"
    return f"{key} is a key of kind {', '.join(kinds)}{its}"


def _section_type(annotation: Any) -> type[BaseModel] | None:
    """Return the first section in an annotation, such as that of ``Section | None``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_type, get_args(annotation))), None)
