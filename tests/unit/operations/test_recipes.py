"""The recipes and launch scripts that the package contains."""

import os
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffmegatron.cli import app
from diffmegatron.config.load import load_stages
from diffmegatron.errors import UserError
from diffmegatron.operations.recipes import CONFIGS, copy, groups, names
from diffmegatron.shipped_files import shipped_folder
from tests.paths import ROOT


def test_every_recipe_is_copied_with_all_that_it_extends(tmp_path: Path) -> None:
    for name in names():
        if not name.startswith(("base/", "clusters/", "launch")):
            (recipe, *_) = copy(name, tmp_path)
            assert recipe == tmp_path / f"{name}.yaml"
            assert load_stages(recipe, allow_missing_files=True) == load_stages(
                CONFIGS / f"{name}.yaml", allow_missing_files=True
            )
    assert (tmp_path / "base/3b.yaml").exists()
    copy("clusters/example", tmp_path)


def test_launch_scripts_are_copied_and_can_be_started(tmp_path: Path) -> None:
    copied = copy("launch", tmp_path)
    assert [path.name for path in copied] == ["prepare.sh", "slurm.sh", "torchrun.sh", "worker.sh"]
    for path in copied:
        assert path.read_bytes() == (ROOT / "launch" / path.name).read_bytes()
        assert os.access(path, os.X_OK)


def test_a_changed_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base/3b.yaml").write_text("model: {}\n")
    with pytest.raises(UserError, match=r"base/3b\.yaml exists and differs"):
        copy("diff_3b_1t", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_an_unknown_recipe_name_is_an_error(tmp_path: Path) -> None:
    for name in ("nope", "../pyproject", "/etc/passwd"):
        with pytest.raises(UserError, match=r"is not a recipe of this package; .* configs list"):
            copy(name, tmp_path)


def test_the_nearest_name_is_given(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'diff_3b_lt\.yaml' .*; did you mean diff_3b_1t\?"):
        copy("diff_3b_lt.yaml", tmp_path)


def test_bases_clusters_and_launch_scripts_are_listed_separately() -> None:
    recipes, *others = groups().values()
    assert "quickstart" in recipes and not any(n.startswith(("base", "clu")) for n in recipes)
    assert "base/3b" in others[0] and others[1:] == [["clusters/example"], ["launch"]]
    assert len(names()) == sum(1 for _ in CONFIGS.rglob("*.yaml")) + 1


def test_the_configs_commands_list_and_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(app, ["configs", "list"]).output
    assert "quickstart" in listed and "The main job at the size of a laptop" in listed
    copied = CliRunner().invoke(app, ["configs", "copy", "scaling/diff_830m.yaml"])
    assert copied.output.splitlines()[0] == "configs/scaling/diff_830m.yaml"
    assert Path("configs/base/scaling.yaml").exists()
    CliRunner().invoke(app, ["configs", "copy", "launch"])
    assert Path("launch/slurm.sh").exists()


def test_quickstart_refuses_before_it_removes_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/quickstart").mkdir(parents=True)
    for arguments in (["steps"], ["--attention", "nope"], ["--attention", "softmax,key"]):
        result = CliRunner().invoke(app, ["quickstart", *arguments])
        assert isinstance(result.exception, UserError) and "is not of the form" in str(
            result.exception
        )
    assert Path("runs/quickstart").exists()


def test_recipes_and_scripts_are_found_where_the_wheel_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = build["targets"]["wheel"]["force-include"]
    assert included == {name: f"diffmegatron/{name}" for name in ("configs", "launch")}
    for name, target in included.items():
        assert shipped_folder(name) == ROOT / name and not (ROOT / name).is_symlink()
        # A folder of this name beside an installed package may belong to another package, so
        # ``shipped_folder`` must not return it.
        (tmp_path / name).mkdir()
        (tmp_path / target).mkdir(parents=True)
    monkeypatch.setattr("diffmegatron.shipped_files._PACKAGE", tmp_path / "diffmegatron")
    for name, target in included.items():
        assert shipped_folder(name) == tmp_path / target
