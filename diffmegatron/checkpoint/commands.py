"""``diffmegatron checkpoint``: look at, verify, average and remove the checkpoints of a run."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffmegatron.errors import UserError
from diffmegatron.files import clipped, shown

if TYPE_CHECKING:
    from rich.text import Text

    from diffmegatron.checkpoint.checkpoint_manifest import Manifest
    from diffmegatron.checkpoint.stage_folders import StageFolder

app = typer.Typer(
    help="List, verify, prune, inspect and average checkpoints.", no_args_is_help=True
)
RunDir = Annotated[
    Path,
    typer.Argument(metavar="RUN_DIR", help="Such as runs/quickstart/diff_v1; with stages, of all"),
]


@app.command("list")
def list_(run_dir: RunDir) -> None:
    """Every checkpoint with its size, and whether it is complete."""
    from rich.console import Console
    from rich.table import Table

    from diffmegatron.checkpoint.stage_folders import stage_folders

    folders = stage_folders(run_dir)
    with_stages = folders[0].name is not None
    table = Table(*(["stage"] if with_stages else []), "step", "GiB", "files", "state")
    for folder in folders:
        for step in folder.store.steps():
            table.add_row(*([folder.name] if with_stages else []), *_row(folder, step))
    Console().print(table)


def _row(folder: "StageFolder", step: int) -> "list[str | Text]":
    from rich.text import Text

    from diffmegatron.checkpoint.checkpoint_manifest import read_manifest

    try:
        manifest = read_manifest(folder.store.path(step))
    except UserError as error:
        return [str(step), "", "", Text(f"damaged: {error}")]
    return [str(step), f"{_gib(manifest):.3f}", str(len(manifest.files)), "complete"]


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a RUN_DIR")],
) -> None:
    """Read every byte, as a start does, and say what is wrong. Exit status 1 if anything is."""
    from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
    from diffmegatron.checkpoint.stage_folders import is_no_run, stage_folders

    if not _is_folder(path):
        raise UserError(f"{shown(path)} is no folder; give a checkpoint or a run_dir")
    checkpoints = [path]
    if not is_no_run(path):
        stores = [folder.store for folder in stage_folders(path)]
        checkpoints = [store.path(step) for store in stores for step in store.steps()]
        if not checkpoints:
            raise UserError(f"{shown(path)} has no checkpoint yet; train first, or give another")
    damaged = 0
    for directory in checkpoints:
        try:
            opened = open_checkpoint(directory)
            print(f"{shown(directory)}: good, {_gib(opened.manifest):.3f} GiB")
        except UserError as error:
            damaged += 1
            print(f"{shown(directory)}: damaged: {error}")
    raise typer.Exit(1 if damaged else 0)


@app.command()
def prune(
    run_dir: RunDir,
    keep_last: Annotated[int, typer.Option(min=1, help="How many of the newest stay")],
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Never remove multiples of this step")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say it, do nothing")] = False,
) -> None:
    """Remove the complete checkpoints that the options do not keep. Damaged ones are left.

    With stages the options hold for each of them.
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
            print(f"nothing to remove of {len(complete)} complete checkpoints{stage}")


@app.command()
def inspect(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Such as RUN_DIR/checkpoints/step_00001000; of a RUN_DIR its newest",
        ),
    ],
) -> None:
    """What a checkpoint holds. Position, versions, every tensor with its shape.

    All of it is read and verified first.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
    from diffmegatron.checkpoint.stage_folders import is_no_run, newest_checkpoint

    directory = checkpoint
    if not is_no_run(checkpoint):
        newest = newest_checkpoint(checkpoint)
        if newest is None:
            raise UserError(
                f"{shown(checkpoint)} has no whole checkpoint; see diffmegatron checkpoint verify"
            )
        directory = newest
    opened = open_checkpoint(directory)
    print(f"{shown(directory)}, {_gib(opened.manifest):.3f} GiB")
    print(json.dumps(opened.state, indent=1))
    table = Table("tensor", "shape")
    for name in sorted(opened.tensors.names()):
        table.add_row(Text(clipped(name)), str(list(opened.tensors.shape(name))))
    Console().print(table)


@app.command()
def average(
    run_dir: RunDir,
    last: Annotated[int, typer.Option(min=2, help="How many of the newest checkpoints")],
    out: Annotated[Path, typer.Option(help="Folder that gets checkpoints/ with the mean")],
) -> None:
    """Write the mean of the weights of the last checkpoints.

    For export, evaluate and checkpoint.start_from. With stages it is that of the last one.
    """
    from diffmegatron.checkpoint.average import average_checkpoints

    print(f"wrote {shown(average_checkpoints(run_dir, last, out))}")


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, say
        return False


def _gib(manifest: "Manifest") -> float:
    return manifest.size / 2**30
