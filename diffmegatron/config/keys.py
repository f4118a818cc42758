"""The reference of all keys of a recipe, read from the fields of its sections."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from diffmegatron.attention.kinds.registry import KINDS
from diffmegatron.config.recipe_sections import RecipeSections
from diffmegatron.errors import UserError
from diffmegatron.files import shorten
from diffmegatron.section import MAX_COUNT, MAX_SIZE, Section

_ATTENTION = "model.attention"
# File with the keys of all releases, each with its first release.
_RELEASED_KEYS = Path(__file__).with_name("released_keys.txt")
# Headings of docs that explain sections and keys, for links from docs/keys.md.
_EXPLANATIONS = {
    "run_dir": "recipes.md#files-and-overrides",
    "imports": "variants.md#a-kind-of-your-own",
    "model": "recipes.md#length-batch-layout-model",
    "model.baseline": "variants.md#kinds-of-attention",
    "model.attention.kind": "variants.md#which-to-choose",
    "model.attention[].layers": "variants.md#layers-of-several-kinds",
    "model.attention.window": "variants.md#sliding-windows",
    "model.attention.output_gate": "variants.md#output-gate",
    "model.attention.qk_norm": "variants.md#norms-of-queries-and-keys",
    "model.attention.headwise_norm": "recipes.md#initial-weights",
    "model.attention.signal_per_noise": "variants.md#comparison-of-kinds",
    "model.attention.selected_heads": "variants.md#dex-extending-a-pretrained-model",
    "model.vocab_size": "data.md#your-own-tokenizer",
    "model.vocab_padding": "pretrained.md#tensor-parallelism",
    "model.rope_scaling": "recipes.md#a-long-context-stage",
    "model.initialization.scheme": "recipes.md#initial-weights",
    "model.initialization.base_hidden_size": "recipes.md#widths-mup",
    "model.lora": "recipes.md#fine-tuning-a-part",
    "data": "data.md#the-data-section-of-a-recipe",
    "data.tokenizer": "data.md#your-own-tokenizer",
    "data.reset_attention_mask": "data.md#for-fine-tuning",
    "data.verify": "data.md#verify",
    "training": "recipes.md#length-batch-layout-model",
    "training.attention_backend": "kernels.md#backends",
    "training.chosen_kernels": "kernels.md#measure-a-machine",
    "training.deterministic": "recovery.md#reproducibility-bit-for-bit",
    "training.evaluate": "evaluation.md#within-training",
    "training.fp8": "recipes.md#fp8",
    "training.profile": "recipes.md#observing-a-run",
    "training.wandb": "recipes.md#observing-a-run",
    "training.z_loss": "recipes.md#the-learning-rate",
    "optimizer": "recipes.md#the-learning-rate",
    "optimizer.kind": "recipes.md#muon",
    "optimizer.trainable": "recipes.md#fine-tuning-a-part",
    "parallel": "parallelism.md#choose-a-layout",
    "parallel.context_communication": "parallelism.md#cost-of-each-option",
    "parallel.overlap_gradients": "design/overlap.md",
    "recompute": "parallelism.md#cost-of-each-option",
    "checkpoint": "recovery.md#checkpoints",
    "checkpoint.start_from": "recipes.md#stages",
    "checkpoint.time_limit_margin": "operations.md#start-a-job",
    "guard": "recovery.md#guard",
    "watchdog": "recovery.md#watchdog",
}
# Bounds that only keep products finite. They are not part of a key's meaning.
_TECHNICAL_BOUNDS = (MAX_SIZE, MAX_COUNT, 2**63 - 1)


class Key(NamedTuple):
    """One key of a recipe.

    Attributes:
        name: all parts of the key, such as ``optimizer.schedule.kind``. A part that ends in ``[]``
            is a list of sections.
        type: accepted values in words.
        default: default value as YAML; None for a key that a recipe must have.
        meaning: description of the key.
        kinds: kinds of attention that have the key; empty if it does not depend on the kind.
        since: first release that has the key, or "unreleased".
    """

    name: str
    type: str
    default: str | None
    meaning: str
    kinds: tuple[str, ...] = ()
    since: str = "unreleased"


def recipe_keys() -> list[Key]:
    """Return all keys of a recipe, in the order of the sections."""
    releases = read_released_keys()
    keys = _section_keys(RecipeSections, "")
    return [key._replace(since=releases.get(key.name, key.since)) for key in keys]


def read_released_keys() -> dict[str, str]:
    """Return the first release of every released key."""
    lines = _RELEASED_KEYS.read_text().splitlines()
    return dict(line.split() for line in lines if not line.startswith("#"))


def find_keys(name: str) -> list[Key]:
    """Return the key ``name``, or all keys of the section ``name``.

    Raises:
        UserError: If a recipe has neither such a key nor such a section.
    """
    named = [(key.name.replace("[]", ""), key) for key in recipe_keys()]
    found = [key for each, key in named if each == name or each.startswith(f"{name}.")]
    if found:
        return found
    plain = dict(named)
    last = name.rpartition(".")[2]
    near = [each for each in plain if each.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(name, plain, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "see diffmegatron configs keys"
    raise UserError(f"{shorten(repr(name))} is not a key or section of a recipe; {hint}")


def markdown_page() -> str:
    """Return the page docs/keys.md."""
    parts = [
        "# Keys of a recipe",
        "`diffmegatron configs keys --markdown` writes this page from the fields of the recipe's "
        "sections. `diffmegatron configs keys training.loss_chunk` prints one key, and "
        "`diffmegatron configs keys optimizer` one section. [recipes.md](recipes.md) explains "
        "recipes. A recipe must have the required keys. A section that may be left out must have "
        "its own. *Since* is the first release that has a key.",
    ]
    by_name: dict[str, list[Key]] = {}
    for key in recipe_keys():
        by_name.setdefault(key.name, []).append(key)
    section = ""
    for name, keys in by_name.items():
        if section != (section := name.partition(".")[0]):
            parts.append(f"## {section}")
            if section in _EXPLANATIONS and section != name:
                parts.append(f"{_link(section)} explains this section.")
        if name != section:
            parts.append(f"### {name}")
        explained = f" ({_link(name)})" if name in _EXPLANATIONS else ""
        parts += [keys[0].meaning + explained, _list(keys)]
    return "\n\n".join(parts) + "\n"


def describe(key: Key) -> str:
    """Return a key with its values, default, first release and meaning as lines of text."""
    default = "must be given" if key.default is None else key.default
    lines = (f"values: {key.type}", f"default: {default}", f"since: {key.since}", _meaning(key))
    return "\n  ".join([key.name, *lines])


def _link(name: str) -> str:
    target = _EXPLANATIONS[name]
    return f"[{target.partition('#')[0]}]({target})"


def _list(keys: Sequence[Key]) -> str:
    """Return a list with the values, the default, the kinds and the release of each key."""
    lines = []
    for key in keys:
        default = "required" if key.default is None else f"default `{key.default}`"
        kinds = [f"kinds {', '.join(key.kinds)}"] if key.kinds else []
        lines.append(f"- {'; '.join([key.type, default, *kinds, f'since {key.since}'])}")
    return "\n".join(lines)


def _meaning(key: Key) -> str:
    kinds = f" ({', '.join(key.kinds)})" if key.kinds else ""
    return key.meaning + kinds


def _section_keys(section: type[Section], prefix: str) -> Iterator[Key]:
    schema = section.model_json_schema()
    for name, field in section.model_fields.items():
        described = schema["properties"][name]
        key = f"{prefix}{name}"
        if key == _ATTENTION:
            yield from _attention_keys()
        elif inner := _inner_section(field.annotation):
            if field.description:
                yield Key(
                    key, type_in_words(described, schema), default_as_yaml(field), field.description
                )
            is_list = "items" in described
            yield from _section_keys(inner, f"{key}{'[]' if is_list else ''}.")
        else:
            meaning = field.description or ""
            yield Key(key, type_in_words(described, schema), default_as_yaml(field), meaning)


def _attention_keys() -> Iterator[Key]:
    """Yield each key of the kinds once, with the kinds that have it unless all do."""
    layers = "layers from 1 of an entry of a list of kinds: 3, '5-8', '1, 5-8'; null: the others"
    by_key: dict[Key, list[str]] = {}
    kinds = ", ".join(f"`{kind}`" for kind in KINDS)
    yield Key(f"{_ATTENTION}.kind", kinds, None, "kind of attention")
    yield Key(f"{_ATTENTION}[].layers", "number, text or null", "null", layers)
    for kind, section in KINDS.items():
        for key in _section_keys(section, f"{_ATTENTION}."):
            if key.name != f"{_ATTENTION}.kind":
                by_key.setdefault(key, []).append(kind)
    for key, having in by_key.items():
        yield key._replace(kinds=() if len(having) == len(KINDS) else tuple(having))


def _inner_section(annotation: Any) -> type[Section] | None:
    """Return the section in an annotation such as ``tuple[Source, ...]``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    inner = map(_inner_section, getattr(annotation, "__args__", ()))
    return next(filter(None, inner), None)


def default_as_yaml(field: FieldInfo) -> str | None:
    """Return the default value of a field as YAML, or None if the field is required."""
    if field.is_required():
        return None
    value = field.default
    if isinstance(value, Section):
        return "{}"
    return _as_yaml(value)


def _as_yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)


def type_in_words(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    """Return the values that a JSON schema accepts, in words."""
    if "$ref" in schema:
        return type_in_words(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema:
        return " or ".join(type_in_words(each, whole) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema.get("type"):
        case "integer" | "number" as kind:
            return ("whole number" if kind == "integer" else "number") + _bounds(schema)
        case "array" if "prefixItems" in schema:
            return f"list of {len(schema['prefixItems'])} numbers"
        case "array":
            return f"list of {_plural(type_in_words(schema['items'], whole))}"
        case "object" if isinstance(schema.get("additionalProperties"), Mapping):
            return f"mapping from text to {type_in_words(schema['additionalProperties'], whole)}"
        case "object":
            return "section"
        case "boolean":
            return "true or false"
        case "null":
            return "null"
        case _:
            return "text"


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    if schema.get("exclusiveMinimum", -1) >= schema.get("minimum", 0):
        del words["minimum"]
    found = [
        f"{words[name]} {_as_yaml(schema[name])}"
        for name in words
        if name in schema and schema[name] not in _TECHNICAL_BOUNDS
    ]
    return " " + " and ".join(found) if found else ""


def _plural(words: str) -> str:
    if words.startswith("list of "):
        return words.replace("list of ", "lists of ", 1)
    head, number, rest = words.partition(" number")
    if number:
        return f"{head} numbers{rest}"
    return {"section": "sections", "text": "texts"}.get(words, words)
