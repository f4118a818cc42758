"""``diffmegatron configs``: the recipes and launch scripts that the package carries, as files."""

import difflib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import diffmegatron
from diffmegatron.config.load import recipe_files
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_bytes, reason, shown

CONFIGS = Path(diffmegatron.__file__).parent / "configs"
LAUNCH = "launch"
_BASE, _CLUSTERS = "base", "clusters"


def groups() -> dict[str, list[str]]:
    """All that can be copied, by what it is: what can be trained, and what cannot.

    The name of a recipe is its path in ``configs/`` without ``.yaml``.
    """
    paths = sorted(path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.yaml"))
    of_folder: dict[str, list[str]] = {_BASE: [], _CLUSTERS: [], "": []}
    for path in paths:
        folder = path.parts[0] if path.parts[0] in of_folder else ""
        of_folder[folder].append(str(path.with_suffix("")))
    return {
        "recipes": of_folder[""],
        "what recipes extend, none by itself": of_folder[_BASE],
        "clusters, for diffmegatron launch": of_folder[_CLUSTERS],
        "scripts": [LAUNCH],
    }


def names() -> list[str]:
    """Those of all :func:`groups`."""
    return [name for group in groups().values() for name in group]


def described(name: str) -> str:
    """The first line of what a recipe says about itself."""
    if name == LAUNCH:
        return "Scripts for Slurm and torchrun."
    first = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""


def copy(name: str, folder: Path) -> list[Path]:
    """Copy a recipe with all that it extends, or the launch scripts.

    Args:
        name: of :func:`groups`.
        folder: takes the place of ``configs/``, or of ``launch/``.

    Returns:
        The files, that of ``name`` first. What is there with the same content stays.

    Raises:
        UserError: there is no such recipe, or a file is there with other content.
    """
    if name.removesuffix(".yaml") not in names():
        near = difflib.get_close_matches(clipped(name.removesuffix(".yaml")), names(), n=1)
        raise UserError(
            f"{clipped(repr(name))} is not one of the recipes; "
            + (f"did you mean {near[0]}?" if near else "see diffmegatron configs list")
        )
    sources = dict(_sources(name.removesuffix(".yaml")))
    targets = {folder / relative: source for relative, source in sources.items()}
    try:
        for target, source in targets.items():
            if os.path.lexists(target) and read_bytes(target) != source.read_bytes():
                raise UserError(
                    f"{shown(target)} is there and differs from the package's; give another folder"
                )
        for target, source in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    except OSError as error:
        raise UserError(f"cannot copy into {shown(folder)}: {reason(error)}") from None
    return [*targets]


def _sources(name: str) -> Iterator[tuple[Path, Path]]:
    """Every file by the path that it is copied to."""
    if name == LAUNCH:
        for script in sorted(Path(__file__).parent.glob("*.sh")):
            yield Path(script.name), script
        return
    file = CONFIGS / f"{name}.yaml"
    # A description of a cluster is no recipe, and extends none.
    files = [file] if name.startswith(f"{_CLUSTERS}/") else recipe_files(file)
    for source in files:
        yield source.relative_to(CONFIGS.resolve()), source
