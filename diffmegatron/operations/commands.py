"""``diffmegatron launch`` and ``status``, and ``attempt``, which the job calls around srun."""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from diffmegatron.errors import UserError

app = typer.Typer(
    help="Called by launch/slurm.sh: the ledger of a job's starts.", no_args_is_help=True
)


@app.command()
def begin(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE")] = None,
    nodes: Annotated[str, typer.Option(help="Host names of the job, with commas")] = "",
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of the job, where launch has read it")
    ] = None,
) -> None:
    """Check the recipe and write a new attempt. Prints what the shell sets for its ranks."""
    from diffmegatron.operations import attempt

    names = [name for name in nodes.split(",") if name]
    print(attempt.begin(config, overrides or [], names, run_dir))


@app.command()
def end(
    folder: Annotated[Path, typer.Argument(metavar="ATTEMPT")],
    spares: Annotated[int, typer.Option(min=0, help="Nodes of the job that have no ranks")] = 0,
) -> None:
    """Decide from the ends of the ranks if the job goes on. Says why, and prints bad hosts.

    Exit status 0: finished. 2: a mistake. 75: to be requeued. 69: to go on at once. 1: too many
    faults in a row.
    """
    from diffmegatron.operations import attempt

    ended, status, hosts = attempt.end(folder, spares)
    print(attempt.sentence(ended), file=sys.stderr)
    print(",".join(hosts))
    raise typer.Exit(status)


@app.command(
    "torchrun", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def torchrun_(context: typer.Context) -> None:
    """Run torchrun so that a signal ends it in a sentence. Called by launch/torchrun.sh.

    Exit status of a signal: 128 and its number, as a shell gives it.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main

    try:
        main(context.args)
    except SignalException as stopped:
        print(f"asked to stop by {stopped.sigval.name}: the ranks have ended", file=sys.stderr)
        raise typer.Exit(128 + stopped.sigval) from None


def status(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Of a job; with stages, of all of them")
    ],
    watch: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Print it again every so often")
    ] = None,
) -> None:
    """Say how far a job is. Progress, speed, last checkpoint, and its attempts.

    Exit status 0: it runs, or is finished.

    1: it waits for its next attempt, or has disappeared; unfinished, where no launcher started it.

    2: it is over and unfinished, or there is no such job.
    """
    from rich.console import Console

    from diffmegatron.operations.status import examine, print_status

    console = Console()
    while True:
        found = examine(run_dir)
        print_status(found, console)
        if watch is None or found.is_over:
            raise typer.Exit(found.exit_status)
        time.sleep(watch)
        console.clear()


def launch(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Recipe")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides")
    ] = None,
    *,
    nodes: Annotated[int, typer.Option(min=1, help="How many")],
    cluster: Annotated[
        Path, typer.Option(metavar="FILE", help="Such as configs/clusters/example.yaml")
    ],
    spares: Annotated[
        int, typer.Option(min=0, help="More nodes, each of which takes the place of one that fails")
    ] = 0,
    dependency: Annotated[str | None, typer.Option(help="As of sbatch, such as afterok:17")] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Each stage of the recipe as a job of its own")
    ] = False,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Without Slurm: start it here, on one machine")
    ] = False,
    rendezvous: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Of the first of several machines, for --torchrun"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the file for sbatch and submit nothing")
    ] = False,
) -> None:
    """Check a recipe for so many nodes and submit it to Slurm.

    The job requeues itself until the run is finished. Its file is kept as RUN_DIR/job.sh.
    """
    if rendezvous is not None and not torchrun:
        raise UserError("--rendezvous is for --torchrun; Slurm's jobs meet by themselves")
    if torchrun:
        if chain or spares or dependency is not None:
            raise UserError(
                "--chain, --spares and --dependency are Slurm's; leave them out with --torchrun"
            )
        _start_torchrun(config, overrides or [], nodes, cluster, rendezvous, dry_run=dry_run)
        return
    from diffmegatron.operations.launch import (
        prepare_chain,
        prepare_launch,
        submit_chain,
        summary,
    )

    arguments = (config, overrides or [], nodes, cluster, dependency, spares)
    found = prepare_chain(*arguments) if chain else (prepare_launch(*arguments),)
    for each in found:
        for line in (*summary(each), *(f"warning: {remark}" for remark in each.remarks)):
            print(line, file=sys.stderr)
    if dry_run:
        for each in found:
            print(f"==> {each.path} <==\n" if chain else "", each.text, sep="", end="")
        return
    for each, number in zip(found, submit_chain(found), strict=True):
        print(f"submitted job {number}: {each.path}")


def _start_torchrun(
    config: Path,
    overrides: list[str],
    nodes: int,
    cluster: Path,
    rendezvous: str | None,
    *,
    dry_run: bool,
) -> None:
    """On one machine this process becomes the run; of several each starts the file."""
    from diffmegatron.operations.torchrun import torchrun_file, write

    path, text = torchrun_file(config, overrides, nodes, cluster, rendezvous)
    if dry_run:
        print(text, end="")
        return
    write(path, text)
    if nodes > 1:
        print(f"start it on each of the {nodes} machines: bash {shlex.quote(str(path))}")
    else:
        os.execvp("bash", ["bash", str(path)])


def preflight(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Recipe")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides")
    ] = None,
) -> None:
    """Check the nodes of a job within a minute, before it trains. As its ranks, or alone.

    Exit status 71: this node is not fit for what the others are fit for. 2: none is.
    """
    from diffmegatron.attempts.ends import RankRecord
    from diffmegatron.training.fault_tolerance.signals import stopping_at_once

    record = RankRecord.of_environment()
    with record.failures(), stopping_at_once(record):
        from diffmegatron.config.load import load_stages
        from diffmegatron.operations.preflight import check_nodes

        check_nodes(load_stages(config, overrides or []), record.folder)


configs = typer.Typer(
    help="The recipes and launch scripts that come with the package.", no_args_is_help=True
)


@configs.command("list")
def list_configs() -> None:
    """Each with the first line of what it says about itself."""
    from diffmegatron.operations import recipes

    for number, (title, names) in enumerate(recipes.groups().items()):
        print(f"{chr(10) * (number > 0)}{title}")
        for name in names:
            print(f"  {name:<38}{recipes.described(name)}".rstrip())


@configs.command("copy")
def copy_configs(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As 'configs list' has it")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Default: configs, or launch for launch")
    ] = None,
) -> None:
    """Copy a recipe with all that it extends, to be run and changed.

    Example: diffmegatron configs copy diff_3b_1t
    """
    from diffmegatron.operations import recipes

    default = Path(recipes.LAUNCH if name == recipes.LAUNCH else "configs")
    for path in recipes.copy(name, folder or default):
        print(path)


def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides for every run: training.steps=1000"),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[,KEY=VALUE...]",
            help="A run of this kind, such as grouped,signal_per_noise=2; may be given several "
            "times; default: the recipe's and its baseline",
        ),
    ] = None,
) -> None:
    """Try all of it in minutes, in runs/quickstart. Prepares, trains a pair, exports, compares.

    The text is that of Python's standard library. A previous runs/quickstart is replaced.
    """
    from diffmegatron.operations import quickstart as job

    job.quickstart(attention or [], overrides or [])
