"""The folders of a recipe's stages in its ``run_dir``; each stage is trained as a separate run."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffmegatron.checkpoint.checkpoint_store import CHECKPOINTS, RECIPE, CheckpointStore
from diffmegatron.config.load import load_resolved
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, os_error_text
from diffmegatron.own_code import NotImportedError


@dataclass(frozen=True)
class StageFolder:
    """The folder of one stage, or of a run without stages (then ``name`` is None)."""

    name: str | None
    run_dir: Path

    @property
    def store(self) -> CheckpointStore:
        """Checkpoints in this folder."""
        return CheckpointStore(self.run_dir)


def stage_folders(
    run_dir: Path, marker: str = CHECKPOINTS, recipe: str = RECIPE
) -> list[StageFolder]:
    """Return the stage folders that contain ``marker`` in a ``run_dir``, in order of training.

    A run without stages has one entry, ``run_dir`` itself. ``marker`` is the name of a file or
    folder. ``recipe`` is the file name of the resolved recipe in the folder of a stage.
    """
    try:
        if (run_dir / marker).exists():
            return [StageFolder(None, run_dir)]
        begun = sorted(path for path in run_dir.iterdir() if (path / marker).exists())
    except OSError as error:
        raise UserError(
            f"{format_path(run_dir)} has no {marker} ({os_error_text(error)}); give the run_dir of "
            "a recipe"
        ) from None
    if not begun:
        raise UserError(f"{format_path(run_dir)} has no {marker}; give the run_dir of a recipe")
    starts = {path.name: _start(path, recipe) for path in begun}
    return [StageFolder(name, run_dir / name) for name in _in_order(starts)]


def last_stage(run_dir: Path) -> StageFolder:
    """Return the last stage of a run; stages without a checkpoint are ignored."""
    begun = [folder for folder in stage_folders(run_dir) if folder.store.steps()]
    if not begun:
        raise UserError(f"{format_path(run_dir)} has no finished checkpoint yet")
    return only_last(begun)


def only_last(folders: Sequence[StageFolder]) -> StageFolder:
    """Return the stage from which no other stage started; UserError unless there is exactly one."""
    starts = {_start(folder.run_dir) for folder in folders}
    ends = [folder for folder in folders if folder.name is None or folder.name not in starts]
    if len(ends) == 1:
        return ends[0]
    # Stages start from each other only if their recipes were edited.
    problem = (
        "several stages from which no other stage started"
        if ends
        else "stages that start from each other"
    )
    listed = ", ".join(format_path(folder.run_dir) for folder in ends or folders)
    raise UserError(f"{format_path(folders[0].run_dir.parent)} has {problem}; give one of {listed}")


def earlier_stages(run_dir: Path) -> list[StageFolder]:
    """Return the stages beside a stage from which its training continued, the last one first."""
    found: list[StageFolder] = []
    name = _start(run_dir)
    while name is not None and name not in {folder.name for folder in found}:
        found.append(StageFolder(name, run_dir.parent / name))
        name = _start(found[-1].run_dir)
    return found


def is_run_dir(path: Path) -> bool:
    """Return whether ``path`` is a ``run_dir``: it or a folder in it contains ``checkpoints``."""
    try:
        stage_folders(path)
    except NotImportedError:
        raise
    except UserError:
        return False
    return True


def newest_checkpoint(path: Path) -> Path | None:
    """Return the newest complete checkpoint of a run's last stage that has checkpoints.

    Returns:
        None if ``path`` is not a ``run_dir``, or if all checkpoints of this stage are damaged.

    Raises:
        UserError: the ``run_dir`` has no checkpoint.
    """
    return last_stage(path).store.latest() if is_run_dir(path) else None


def source_recipe(recipe: Recipe, stages: Sequence[Recipe] = ()) -> Recipe | None:
    """Return the recipe of the run whose weights a run starts with.

    It is one of ``stages``, or it is read from ``checkpoint.start_from``. Return None if the run
    starts with random weights, or if that recipe cannot be read.
    """
    start = recipe.checkpoint.start_from
    if start is None:
        return None
    for stage in stages:
        if stage.run_dir == start:
            return stage
    try:
        folder = newest_checkpoint(Path(start)) or Path(start)
        return load_resolved(folder / RECIPE, folder.resolve().parent.parent)
    except UserError:
        return None


def earlier_recipes(recipe: Recipe, stages: Sequence[Recipe] = ()) -> list[Recipe]:
    """Return the recipes of all runs that trained the weights before a run, the last one first.

    Return [] if one of them cannot be read, or if runs start from each other.
    """
    found: list[Recipe] = []
    while recipe.checkpoint.start_from is not None:
        source = source_recipe(recipe, stages)
        if source is None or source.run_dir in {each.run_dir for each in found}:
            return []
        found.append(source)
        recipe = source
    return found


def _start(run_dir: Path, recipe: str = RECIPE) -> str | None:
    """Return the name of the sibling folder from which a stage started, or None."""
    try:
        start_from = load_resolved(run_dir / recipe).checkpoint.start_from
    except NotImportedError:
        raise
    except UserError:  # e.g. the recipe is truncated
        return None
    if start_from is None:
        return None
    start = Path(os.path.normpath(start_from))
    # Compare names, because the whole run_dir may have been moved.
    is_beside = start.parent.name == run_dir.resolve().parent.name
    return start.name if is_beside and start.name != run_dir.name else None


def _in_order(starts: dict[str, str | None]) -> Iterator[str]:
    left = dict(starts)
    while left:
        ready = [name for name, start in left.items() if start not in left]
        # If stages start from each other in a circle, none is ready.
        for name in ready or list(left):
            del left[name]
            yield name
