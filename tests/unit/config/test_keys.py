"""Tests of the reference of a recipe's keys, and of docs/keys.md."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diffmegatron.attention.kinds.registry import KINDS
from diffmegatron.config import keys as keys_module
from diffmegatron.config.keys import find_keys, markdown_page, read_released_keys, recipe_keys
from diffmegatron.config.load import load_stages
from diffmegatron.errors import UserError
from diffmegatron.shipped_files import shipped_folder
from tests.paths import DOCS, ROOT

CONFIGS = shipped_folder("configs")
RECIPES = [path for path in CONFIGS.rglob("*.yaml") if path.parent.name not in ("base", "clusters")]


def test_the_page_is_that_of_the_fields():
    """Check docs/keys.md; ``diffmegatron configs keys --markdown > docs/keys.md`` writes it."""
    assert (DOCS / "keys.md").read_text() == markdown_page()


def test_every_key_has_a_meaning_and_one_heading():
    keys = recipe_keys()
    assert [key.name for key in keys if not key.meaning] == []
    headings = re.findall(r"^#+ (\S+)$", markdown_page(), re.MULTILINE)
    assert len(headings) == len({*headings}) and {key.name for key in keys} <= {*headings}
    # The page has one meaning for all kinds with a key.
    assert len({(key.name, key.meaning) for key in keys}) == len({key.name for key in keys})


def test_explanations_belong_to_keys_or_sections():
    names = {key.name for key in recipe_keys()}
    names |= {name.partition(".")[0] for name in names}
    assert [name for name in keys_module._EXPLANATIONS if name not in names] == []


def test_a_key_with_several_defaults_is_found_with_all_of_them():
    found = find_keys("model.attention.headwise_norm")
    assert {(key.kinds, key.default) for key in found} == {
        (("softmax", "dex"), "false"),
        (("diff_v1", "grouped"), "true"),
    }


def test_released_keys_exist_and_have_a_release_of_the_changelog():
    """Check released_keys.txt; a release adds the unreleased keys of ``configs keys`` to it."""
    released = read_released_keys()
    assert [name for name in released if name not in {key.name for key in recipe_keys()}] == []
    releases = re.findall(r"^## (\d\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert {*released.values()} == {*releases}
    assert {key.since for key in find_keys("training.steps")} == {"0.1.0"}
    unreleased = {key.name for key in recipe_keys() if key.since == "unreleased"}
    assert unreleased == {key.name for key in recipe_keys()} - {*released}


def names(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all values of a dumped recipe."""
    for key, value in values.items():
        for each in value if isinstance(value, list | tuple) and value else [value]:
            if isinstance(each, dict):
                yield from names(each, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_recipe_is_listed(path: Path):
    listed = {key.name.replace("[]", "") for key in recipe_keys()}
    for recipe in load_stages(path, allow_missing_files=True):
        found = set(names(recipe.model_dump(mode="json")))
        # Patterns of tensors are keys of a mapping, and DEX's file of heads is not there.
        others = ("lr_multipliers", "selected_heads.file")
        assert [name for name in found - listed if not any(each in name for each in others)] == []


def test_a_key_of_some_kinds_names_them():
    keys = {(key.name, key.kinds) for key in recipe_keys()}
    assert ("model.attention.lambda_std", ("diff_v1", "grouped")) in keys
    assert ("model.attention.num_heads", ()) in keys
    (kind,) = find_keys("model.attention.kind")
    assert all(f"`{name}`" in kind.type for name in KINDS)


def test_a_section_is_found_and_a_wrong_name_gets_a_hint():
    assert {key.name for key in find_keys("data.upsampling")} == {
        f"data.upsampling.{name}" for name in ("mode", "long_tokens", "keep_short")
    }
    with pytest.raises(UserError, match=r"did you mean training\.micro_batch_size\?"):
        find_keys("micro_batch_size")
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        find_keys("optimizer.lrr")


def test_values_are_described_by_their_bounds():
    types = {key.name: key.type for key in recipe_keys()}
    assert types["data.validation_fraction"] == "number at least 0 and below 1"
    assert types["optimizer.schedule.decay_ratio"] == "number above 0 and below 1 or null"
    assert types["model.num_layers"] == "whole number at least 1"
    assert types["parallel.zero_stage"] == "`1`, `2`, `3`"
    assert types["model.attention.selected_heads"] == "list of lists of whole numbers"
