"""Tests that ``plan`` prints numbers or one sentence for random recipes and options."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import strategies as st
from pydantic import BaseModel

from diffmegatron.attention.kinds import KINDS, LayerKinds
from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting.hardware import ACCELERATORS
from tests.conftest import TINY
from tests.robustness.cases import for_all, run

VALID: dict[str, Any] = yaml.safe_load(TINY.format(run_dir="run", corpus="corpus"))


def leaves(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in nested mappings by their dotted keys."""
    found = {}
    for name, value in values.items():
        dots = f"{prefix}{name}"
        found |= leaves(value, f"{dots}.") if isinstance(value, dict) else {dots: value}
    return found


def sections(annotation: object) -> list[type[BaseModel]]:
    """Return the section classes of a field; the field ``attention`` has one class per kind."""
    if annotation is LayerKinds:
        return list(KINDS.values())
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return [annotation] if is_section else []


def keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Return the dotted keys of all fields and sections of the schema."""
    found = []
    for name, field in section.model_fields.items():
        found.append(f"{prefix}{name}")
        for each in sections(field.annotation):
            found += keys(each, f"{prefix}{name}.")
    return list(dict.fromkeys(found))


def words(section: type[BaseModel] = Recipe) -> set[str]:
    """Return all strings that the schema lists as values of a field, such as "bf16"."""
    annotations = [field.annotation for field in section.model_fields.values()]
    own = {word for each in annotations for word in get_args(each) if isinstance(word, str)}
    return own.union(*(words(each) for some in annotations for each in sections(some)))


EDGES = [
    *(0, -1, 1, 2, 3, 4, 5, 6, 8, 16, 24, 32, 64, 128, 320, 1024, 4096, 10**8),
    *(2**31 - 1, 2**31, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400),
    *(0.5, 1.0, 1e-6, 1e308, -0.0, 5e-324, float("inf"), float("nan"), True, False, None),
]
ODD = [
    *("", ".", "..", "/", "~", "a/../b", 300 * "x", 300 * "x/", "a\0b", "\ud800", "[/x]", "\n"),
    *("1:30", "2001-01-01", "1e5", "9" * 6_000, "bytes", "cl100k_base"),
]
simple = (
    st.sampled_from(EDGES)
    | st.integers(1, 64)
    | st.integers()
    | st.floats()
    | st.sampled_from(sorted(words()))
    | st.sampled_from(ODD)
    | st.text(max_size=8)
)
name = st.sampled_from(sorted({part for each in keys() for part in each.split(".")}))
key = name | st.sampled_from(["path", "weight", "name", "extends", "stages", "<<"]) | st.text()
value = simple | st.recursive(
    simple,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(key, inner, max_size=3),
    max_leaves=6,
)
dotted = st.sampled_from(keys()) | st.lists(key, max_size=4).map(".".join)
# Values as a user may type them, including invalid YAML.
typed = value.map(lambda each: json.dumps(each, ensure_ascii=False)) | st.sampled_from(
    [*ODD, *map(str, EDGES), "&a [*a]", "*a", "!!int x", 50 * "[", "{a: 1, a: 2}", "'", "- a\n- b"]
)
# All values of the valid recipe, with defaults. As overrides they change nothing.
FITTING = leaves(Recipe.model_validate(VALID).model_dump(mode="json"))
fitting = st.sampled_from(sorted(FITTING.items())).map(
    lambda pair: f"{pair[0]}={json.dumps(pair[1])}"
)
override = fitting | st.builds("{}={}".format, dotted, typed) | st.text(max_size=20)
ranks = st.sampled_from([0, -1, 1, 2, 4, 8, 64, 720_720, 2**20, 2**20 + 1, 10**30]) | st.integers()
options = st.fixed_dictionaries(
    {},
    optional={
        "--gpus": ranks.map(str),
        "--hardware": st.sampled_from([*ACCELERATORS, "V100", "", "h100.json", 3_000 * "x"]),
    },
).map(lambda given: [word for pair in given.items() for word in pair])
no_options: st.SearchStrategy[list[str]] = st.just([])
change = st.sampled_from(sorted(FITTING.items())) | st.tuples(dotted, value)
changes = st.lists(change, max_size=3).map(dict)
stages = st.lists(st.dictionaries(name | st.just("name"), value, max_size=3), max_size=3)


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with new values under dotted keys; missing sections are created."""
    copy: dict[str, Any] = json.loads(json.dumps(values))
    for dots, new in changes.items():
        section, parts = copy, dots.split(".")
        for part in parts[:-1]:
            below = section.get(part)
            section[part] = section = below if isinstance(below, dict) else {}
        section[parts[-1]] = new
    return copy


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    path = tmp_path / "valid.yaml"
    path.write_text(json.dumps(VALID))
    return path


def test_overrides_and_options(valid, cases, is_long):
    seen: Counter[int] = Counter()

    def check(options: list[str], overrides: list[str]) -> None:
        # The "--" allows overrides that begin with a dash. Without it they would be options.
        seen[run("plan", "--json", *options, "--", str(valid), *overrides)] += 1

    for_all(cases, is_long, check, no_options | options, st.lists(override, max_size=2))
    # Both results must be frequent: numbers (status 0) and a sentence (status 2).
    assert seen[0] > cases / 20 and seen[2] > cases / 20, seen


def test_recipes(tmp_path, cases, is_long):
    seen: Counter[int] = Counter()
    path = tmp_path / "recipe.yaml"

    def check(changes: dict[str, Any], more: Any, as_json: bool) -> None:
        values = changed(VALID, changes) | more
        path.write_text(json.dumps(values))
        seen[run("plan", str(path), *(["--json"] if as_json else []))] += 1

    staged = st.fixed_dictionaries({"stages": stages | value}) | st.just({})
    for_all(cases, is_long, check, changes, st.just({}) | staged, st.integers(0, 3).map(bool))
    assert seen[0] > cases / 20 and seen[2] > cases / 20, seen


def test_sizes(valid, cases, is_long):
    """Check ``plan`` with random sizes of the model, batch and layout.

    Many of the sizes divide each other, so that some of the recipes are valid.
    """
    seen: Counter[int] = Counter()
    size = st.sampled_from([1, 2, 3, 4, 8, 12, 64, 720_720, 10**8, 2**30, 2**31 - 1])
    layout = st.sampled_from([1, 1, 2, 3, 4, 64, 4096])
    attention = st.sampled_from(sorted(KINDS))
    drawn = {f"model.attention.{each}": size for each in ("num_heads", "num_kv_heads")}
    drawn |= {"model.attention.kind": attention, "model.num_layers": size}
    drawn |= {f"model.{each}": size for each in ("hidden_size", "ffn_hidden_size", "vocab_size")}
    drawn |= {f"training.{each}": size for each in ("seq_length", "global_batch_size", "steps")}
    drawn |= {f"parallel.{each}": layout for each in ("tensor", "context", "pipeline")}
    drawn |= {"model.attention.head_dim": st.just(2), "training.micro_batch_size": st.just(1)}
    drawn |= {"data.tokenizer": st.just("none"), "optimizer.schedule.warmup_steps": st.just(0)}

    def check(sizes: dict[str, object], options: list[str]) -> None:
        overrides = [f"{key}={size}" for key, size in sizes.items()]
        seen[run("plan", str(valid), "--json", *options, *overrides)] += 1

    sizes = st.fixed_dictionaries({}, optional=drawn)
    for_all(cases, is_long, check, sizes, no_options | options)
    assert seen[0] > cases / 50 and seen[2] > cases / 20, seen


def test_searches(valid, cases, is_long):
    seen: Counter[int] = Counter()
    layers = st.sampled_from([1, 2, 12, 28, 64, 2**31 - 1])

    def check(gpus: int, layers: int, length: int, overrides: list[str]) -> None:
        own = [f"model.num_layers={layers}", f"training.seq_length={length}"]
        seen[run("plan", "--search", str(gpus), "--", str(valid), *own, *overrides)] += 1

    lengths = st.sampled_from([64, 4096, 65_536])
    for_all(cases // 20, is_long, check, ranks, layers, lengths, st.lists(override, max_size=1))
    assert seen[0] and seen[2], seen
