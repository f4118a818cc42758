"""``diffmegatron configs``: list and copy the recipes and launch scripts of this package."""

import difflib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from diffmegatron.config.load import recipe_files
from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, format_path, read_bytes, shorten, write_durably
from diffmegatron.shipped_files import shipped_folder

CONFIGS = shipped_folder("configs")
LAUNCH = "launch"
_BASE, _CLUSTERS = "base", "clusters"


def groups() -> dict[str, list[str]]:
    """Return a dict of all names that ``configs copy`` accepts: title of a group -> its names.

    Names are paths in ``configs/`` without ``.yaml``, and ``launch`` for the launch scripts.
    """
    paths = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
    by_folder: dict[str, list[str]] = {_BASE: [], _CLUSTERS: [], "": []}
    for path in paths:
        folder = path.parts[0] if path.parts[0] in by_folder else ""
        by_folder[folder].append(str(path.with_suffix("")))
    return {
        "recipes": by_folder[""],
        "parts that recipes extend (not recipes by themselves)": by_folder[_BASE],
        "cluster files for diffmegatron launch": by_folder[_CLUSTERS],
        "scripts": [LAUNCH],
    }


def names() -> list[str]:
    """Return the names of all groups."""
    return [name for group in groups().values() for name in group]


def description(name: str) -> str:
    """Return the one-line description of a name: the comment in the first line of its file."""
    if name == LAUNCH:
        return "Job scripts for Slurm and torchrun."
    first = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a recipe with all files that it extends, a cluster file, or the launch scripts.

    Return the paths of the copies in ``folder``, beginning with that of ``name``. An existing file
    with other content is never replaced.
    """
    if name.removesuffix(".yaml") not in names():
        near = difflib.get_close_matches(shorten(name.removesuffix(".yaml")), names(), n=1)
        raise UserError(
            f"{shorten(repr(name))} is not a recipe of this package; "
            + (f"did you mean {near[0]}?" if near else "see diffmegatron configs list")
        )
    sources = dict(_sources(name.removesuffix(".yaml")))
    targets = {folder / relative: source for relative, source in sources.items()}
    with explain_os_errors(f"cannot copy into {format_path(folder)}"):
        for target, source in targets.items():
            if os.path.lexists(target) and read_bytes(target) != source.read_bytes():
                raise UserError(
                    f"{format_path(target)} exists and differs from the package's; give another "
                    "folder"
                )
        for target, source in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            write_durably(target, source.read_bytes())
            shutil.copymode(source, target)
    return [*targets]


def _sources(name: str) -> Iterator[tuple[Path, Path]]:
    """Yield, for every file to copy, its path in the target folder and its source path."""
    if name == LAUNCH:
        for script in sorted(shipped_folder("launch").glob("*.sh")):
            yield Path(script.name), script
        return
    file = CONFIGS / f"{name}.yaml"
    files = [file] if name.startswith(f"{_CLUSTERS}/") else recipe_files(file)
    for source in files:
        yield source.relative_to(CONFIGS), source
