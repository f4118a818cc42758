"""The recipe at the top of docs/recipes.md loads; only its ``data.tokenizer`` is optional."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text()
TEXT = re.search(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)[1]
OPTIONAL = {("data", "tokenizer")}


def keys(section: dict, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in section.items():
        yield (*path, name)
        if isinstance(value, dict):
            yield from keys(value, (*path, name))


def test_the_recipe_loads_with_the_documented_precision(tmp_path: Path):
    (tmp_path / "first.yaml").write_text(TEXT)
    recipe = load_recipe(tmp_path / "first.yaml")
    assert f"`training.precision` is `{recipe.training.precision}` by default" in PAGE


@pytest.mark.parametrize("path", sorted({*keys(yaml.safe_load(TEXT))} - OPTIONAL), ids=".".join)
def test_no_other_key_can_be_left_out(path: tuple[str, ...], tmp_path: Path):
    recipe = copy.deepcopy(yaml.safe_load(TEXT))
    section = recipe
    for name in path[:-1]:
        section = section[name]
    del section[path[-1]]
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(UserError, match=path[-1]):
        load_recipe(tmp_path / "first.yaml")
