"""The folders of a recipe's stages in its ``run_dir``, for whoever is given that ``run_dir``."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffmegatron.checkpoint.checkpoint_store import CHECKPOINTS, RECIPE, CheckpointStore
from diffmegatron.config.load import load_resolved
from diffmegatron.errors import UserError
from diffmegatron.files import reason, shown
from diffmegatron.own_code import NotImportedError


@dataclass(frozen=True)
class StageFolder:
    """A run within a ``run_dir``.

    Attributes:
        name: of the stage; None: the ``run_dir`` is one run, without stages.
        run_dir: its own, ``RUN_DIR/NAME``.
    """

    name: str | None
    run_dir: Path

    @property
    def store(self) -> CheckpointStore:
        """Its checkpoints."""
        return CheckpointStore(self.run_dir)


def stage_folders(
    run_dir: Path, having: str = CHECKPOINTS, recipe: str = RECIPE
) -> list[StageFolder]:
    """The runs of a ``run_dir``: each stage after the one that it started from, or the one run.

    The order is that of ``checkpoint.start_from`` in the stages' own recipes, and of their names
    where several started from one.

    Args:
        run_dir: of a recipe.
        having: what each run has in its folder to be one.
        recipe: file in its folder with its resolved recipe.

    Raises:
        UserError: there is no run in it.
    """
    try:
        if (run_dir / having).exists():
            return [StageFolder(None, run_dir)]
        begun = sorted(path for path in run_dir.iterdir() if (path / having).exists())
    except OSError as error:
        raise UserError(
            f"{shown(run_dir)} has no {having} ({reason(error)}); give the run_dir of a recipe"
        ) from None
    if not begun:
        raise UserError(f"{shown(run_dir)} has no {having}; give the run_dir of a recipe")
    starts = {path.name: _start(path, recipe) for path in begun}
    return [StageFolder(name, run_dir / name) for name in _in_order(starts)]


def last_stage(run_dir: Path) -> StageFolder:
    """The stage with a checkpoint from which none with one has started, or the one run.

    Raises:
        UserError: there is no run in it, or several such stages.
    """
    begun = [folder for folder in stage_folders(run_dir) if folder.store.steps()]
    if not begun:
        raise UserError(f"{shown(run_dir)} has no finished checkpoint yet")
    return one_end(begun)


def one_end(folders: Sequence[StageFolder]) -> StageFolder:
    """The one of some stages of a ``run_dir`` from which none of them has started.

    Raises:
        UserError: there are several.
    """
    starts = {_start(folder.run_dir) for folder in folders}
    ends = [folder for folder in folders if folder.name is None or folder.name not in starts]
    if len(ends) > 1:
        listed = ", ".join(shown(folder.run_dir) for folder in ends)
        raise UserError(
            f"{shown(ends[0].run_dir.parent)} has several last stages; give one of {listed}"
        )
    return ends[0]


def is_no_run(path: Path) -> bool:
    """Whether there is no run in a folder, as in that of a checkpoint.

    Raises:
        NotImportedError: the stages of one cannot be read without the code that they name.
    """
    try:
        stage_folders(path)
    except NotImportedError:
        raise
    except UserError:
        return True
    return False


def newest_checkpoint(path: Path) -> Path | None:
    """The newest whole checkpoint of a ``run_dir``, with stages that of the last one.

    Returns:
        None where ``path`` is the ``run_dir`` of no run.

    Raises:
        UserError: as :func:`last_stage`.
    """
    return None if is_no_run(path) else last_stage(path).store.latest()


def _start(run_dir: Path, recipe: str = RECIPE) -> str | None:
    """The name of the stage beside it that a stage started from."""
    try:
        start_from = load_resolved(run_dir / recipe).checkpoint.start_from
    except NotImportedError:
        raise
    except UserError:  # of a run whose disk was full, or by hand
        return None
    if start_from is None:
        return None
    start = Path(os.path.normpath(start_from))
    # The folder may have been moved as a whole.
    is_beside = start.parent.name == run_dir.resolve().parent.name
    return start.name if is_beside and start.name != run_dir.name else None


def _in_order(starts: dict[str, str | None]) -> Iterator[str]:
    left = dict(starts)
    while left:
        ready = [name for name, start in left.items() if start not in left]
        # Recipes by hand may start from each other.
        for name in ready or list(left):
            del left[name]
            yield name
