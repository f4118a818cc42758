"""``diffmegatron checkpoint``: look at, verify and remove the checkpoints of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.checkpoint.checkpoint_manifest import Manifest, read_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore, prunable
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, shown

app = typer.Typer(
    help="List, verify, prune and inspect the checkpoints of a run.", no_args_is_help=True
)
RunDir = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="Such as runs/quickstart/differential")
]


@app.command("list")
def list_(run_dir: RunDir) -> None:
    """Every checkpoint with its size, and whether its files are all there."""
    store = _store(run_dir)
    table = Table("step", "GiB", "files", "state")
    for step in store.steps():
        try:
            manifest = read_manifest(store.path(step))
            table.add_row(str(step), f"{_gib(manifest):.3f}", str(len(manifest.files)), "complete")
        except UserError as error:
            table.add_row(str(step), "", "", Text(f"damaged: {error}"))
    Console().print(table)


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A checkpoint, or a RUN_DIR")],
) -> None:
    """Read every byte, as a start does, and say what is wrong; exit status 1 if anything is."""
    from diffmegatron.checkpoint.contents import open_checkpoint

    if not _is_folder(path):
        raise UserError(f"{shown(path)} is no folder; give a checkpoint or a run_dir")
    checkpoints = [path]
    if _is_folder(path / "checkpoints"):
        store = _store(path)
        checkpoints = [store.path(step) for step in store.steps()]
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
    """Remove the complete checkpoints that the options do not keep; damaged ones are left."""
    store = _store(run_dir)
    steps = prunable(store.complete(), keep_last, keep_every)
    for step in steps:
        if not dry_run:
            store.remove(step)
        print(f"{'would remove' if dry_run else 'removed'} {store.path(step)}")
    if not steps:
        print(f"nothing to remove of {len(store.complete())} complete checkpoints")


@app.command()
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Such as RUN_DIR/checkpoints/step_00001000")
    ],
) -> None:
    """What a checkpoint holds: position, versions, every tensor with its shape.

    All of it is read and verified first.
    """
    from diffmegatron.checkpoint.contents import open_checkpoint

    opened = open_checkpoint(checkpoint)
    print(json.dumps(opened.state, indent=1))
    table = Table("tensor", "shape")
    for name in sorted(opened.tensors.names()):
        table.add_row(Text(clipped(name)), str(list(opened.tensors.shape(name))))
    Console().print(table)


def _store(run_dir: Path) -> CheckpointStore:
    store = CheckpointStore(run_dir)
    if not _is_folder(store.directory):
        raise UserError(f"{shown(run_dir)} has no checkpoints; give the run_dir of a recipe")
    return store


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, say
        return False


def _gib(manifest: Manifest) -> float:
    return manifest.size / 2**30
