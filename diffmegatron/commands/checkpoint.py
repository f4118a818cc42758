"""``diffmegatron checkpoint``: list, verify, inspect, average and remove a run's checkpoints."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffmegatron.errors import UserError
from diffmegatron.files import format_path, shorten

if TYPE_CHECKING:
    from rich.text import Text

    from diffmegatron.checkpoint.checkpoint_manifest import CheckpointManifest
    from diffmegatron.checkpoint.stage_folders import StageFolder

app = typer.Typer(
    help="List, verify, prune, inspect and average checkpoints.", no_args_is_help=True
)
RunDir = Annotated[
    Path,
    typer.Argument(metavar="RUN_DIR", help="run_dir of a recipe, such as runs/quickstart/diff_v1"),
]


@app.command("list")
def list_(run_dir: RunDir) -> None:
    """List all checkpoints with their state.

    Size and number of files are shown for complete checkpoints only.
    """
    from rich.console import Console
    from rich.table import Table

    from diffmegatron.checkpoint.stage_folders import stage_folders

    folders = stage_folders(run_dir)
    has_stages = folders[0].name is not None
    table = Table(*(["stage"] if has_stages else []), "step", "GiB", "files", "state")
    for folder in folders:
        for step in folder.store.steps():
            table.add_row(*([folder.name] if has_stages else []), *_row(folder, step))
    Console().print(table)


def _row(folder: "StageFolder", step: int) -> "list[str | Text]":
    from rich.text import Text

    from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest

    try:
        manifest = read_checkpoint_manifest(folder.store.path(step))
    except UserError as error:
        return [str(step), "", "", Text(f"damaged: {error}")]
    return [str(step), f"{_gib(manifest):.3f}", str(len(manifest.files)), "complete"]


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a RUN_DIR")],
) -> None:
    """Read every byte of one or all checkpoints, and report damage.

    A run makes the same checks before it resumes from a checkpoint. The exit status is 1 if a
    checkpoint is damaged.
    """
    from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
    from diffmegatron.checkpoint.stage_folders import is_run_dir, stage_folders

    if not _is_folder(path):
        raise UserError(f"{format_path(path)} is not a folder; give a checkpoint or a run_dir")
    checkpoints = [path]
    if is_run_dir(path):
        stores = [folder.store for folder in stage_folders(path)]
        checkpoints = [store.path(step) for store in stores for step in store.steps()]
        if not checkpoints:
            raise UserError(f"{format_path(path)} has no checkpoint yet; give another run_dir")
    damaged = 0
    for directory in checkpoints:
        try:
            opened = open_checkpoint(directory)
            print(f"{format_path(directory)}: good, {_gib(opened.manifest):.3f} GiB")
        except UserError as error:
            damaged += 1
            print(f"{format_path(directory)}: damaged: {error}")
    raise typer.Exit(1 if damaged else 0)


@app.command()
def prune(
    run_dir: RunDir,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Also keep multiples of this step")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the paths and remove nothing")
    ] = False,
) -> None:
    """Remove complete checkpoints that no option keeps.

    Damaged checkpoints are never removed.

    In a run with stages, the options apply to each stage separately.
    """
    from diffmegatron.checkpoint.checkpoint_store import prunable
    from diffmegatron.checkpoint.stage_folders import stage_folders

    for folder in stage_folders(run_dir):
        store = folder.store
        complete = store.complete()
        steps = prunable(complete, keep_last, keep_every)
        for step in steps:
            if not dry_run:
                store.remove(step)
            print(f"{'would remove' if dry_run else 'removed'} {store.path(step)}")
        if not steps:
            stage = "" if folder.name is None else f" of stage {folder.name}"
            print(f"nothing to remove among {len(complete)} complete checkpoints{stage}")


@app.command()
def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="RUN_DIR/checkpoints/step_00001000, or a RUN_DIR for its newest checkpoint",
        ),
    ],
) -> None:
    """Verify a checkpoint; print its state and tensor shapes.

    The state is the step, the place in the data and the versions of the libraries that wrote the
    checkpoint.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
    from diffmegatron.checkpoint.stage_folders import is_run_dir, newest_checkpoint

    directory = checkpoint
    if is_run_dir(checkpoint):
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise UserError(
                f"{format_path(checkpoint)} has no complete checkpoint; run diffmegatron "
                "checkpoint verify to see the damage"
            )
        directory = newest
    opened = open_checkpoint(directory)
    print(f"{format_path(directory)}, {_gib(opened.manifest):.3f} GiB")
    print(json.dumps(opened.state, indent=1))
    table = Table("tensor", "shape")
    for name in sorted(opened.tensors.names()):
        table.add_row(Text(shorten(name)), str(list(opened.tensors.shape(name))))
    Console().print(table)


@app.command()
def average(
    run_dir: RunDir,
    last: Annotated[int, typer.Option(min=2, help="Number of newest checkpoints to average")],
    out: Annotated[Path, typer.Option(help="Folder in which checkpoints/ is created")],
) -> None:
    """Average the weights of the newest checkpoints of a run.

    In a run with stages, checkpoints of the last stage are averaged.

    The result is a checkpoint in OUT, which export, evaluate and the recipe key
    checkpoint.start_from accept.
    """
    from diffmegatron.checkpoint.weights import average_checkpoints

    print(f"wrote {format_path(average_checkpoints(run_dir, last, out))}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # e.g. the name is too long
        return False


def _gib(manifest: "CheckpointManifest") -> float:
    return manifest.size / 2**30
