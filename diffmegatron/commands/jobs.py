"""Commands for jobs, attempts, preflight checks, the quickstart and the shipped recipes.

An attempt is one start of a job's ranks.
"""

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from diffmegatron.errors import UserError

app = typer.Typer(
    help="Begin and end attempts of a job, for launch/slurm.sh.", no_args_is_help=True
)


@app.command()
def begin(
    config: Annotated[Path, typer.Argument(metavar="CONFIG")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE")] = None,
    nodes: Annotated[str, typer.Option(help="Host names of the job, with commas")] = "",
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the job's ledger, from launch")
    ] = None,
) -> None:
    """Begin an attempt and print the shell variables of its ranks.

    The recipe is checked first.
    """
    from diffmegatron.operations import attempt

    names = [name for name in nodes.split(",") if name]
    print(attempt.begin(config, overrides or [], names, run_dir))


@app.command()
def end(
    folder: Annotated[Path, typer.Argument(metavar="ATTEMPT")],
    spares: Annotated[int, typer.Option(min=0, help="Number of nodes without ranks")] = 0,
) -> None:
    """End an attempt and print the hosts that the next one avoids.

    The exit status determines how the job continues.

    Exit status 0: finished. 2: a mistake in the input. 75: requeue the job. 69: begin the next
    attempt at once. 1: too many faults in a row.
    """
    from diffmegatron.operations import attempt

    ended, status, hosts = attempt.end(folder, spares)
    print(attempt.describe_attempt(ended), file=sys.stderr)
    print(",".join(hosts))
    raise typer.Exit(status)


@app.command(
    "torchrun", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def torchrun_(context: typer.Context) -> None:
    """Run torchrun for launch/torchrun.sh.

    If a signal ends torchrun, this command prints one sentence instead of a traceback.

    Exit status after a signal: 128 plus the number of the signal.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main

    try:
        main(context.args)
    except SignalException as stopped:
        print(f"stopped by {stopped.sigval.name}: the ranks have ended", file=sys.stderr)
        raise typer.Exit(128 + stopped.sigval) from None


def status(
    run_dir: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIR", help="run_dir of a job, or folder of its stages"),
    ],
    watch: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Print again at this interval")
    ] = None,
) -> None:
    """Show a job's progress, speed, newest checkpoint and attempts.

    Exit status 0: the job runs, or is finished.

    1: the job waits for its first or next attempt, hangs or has disappeared; or the run was started
    without a job script and is unfinished.

    2: the job has ended unfinished, or the folder contains no job.
    """
    from rich.console import Console

    from diffmegatron.operations.status import examine_run, print_status

    console = Console()
    while True:
        found = examine_run(run_dir)
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
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes with ranks")],
    cluster: Annotated[
        Path, typer.Option(metavar="FILE", help="Cluster file (configs/clusters/example.yaml)")
    ],
    spares: Annotated[
        int, typer.Option(min=0, help="Number of additional nodes to replace failed ones")
    ] = 0,
    dependency: Annotated[
        str | None, typer.Option(help="Value of sbatch --dependency, such as afterok:17")
    ] = None,
    chain: Annotated[
        bool, typer.Option("--chain", help="Submit a job for each stage of the recipe")
    ] = False,
    torchrun: Annotated[
        bool, typer.Option("--torchrun", help="Start the run with torchrun instead of Slurm")
    ] = False,
    rendezvous: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address of the first of several machines, with --torchrun"
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job file and submit nothing")
    ] = False,
) -> None:
    """Check a recipe against a cluster and submit it to Slurm.

    The job requeues itself until the run is finished or a person must act. The job file is kept as
    RUN_DIR/job.sh. With --torchrun, a start script is written and nothing is submitted.
    """
    if rendezvous is not None and not torchrun:
        raise UserError("--rendezvous needs --torchrun; leave it out for a Slurm job")
    if torchrun:
        if chain or spares or dependency is not None:
            raise UserError(
                "--chain, --spares and --dependency need Slurm; leave them out with --torchrun"
            )
        _start_torchrun(config, overrides or [], nodes, cluster, rendezvous, dry_run=dry_run)
        return
    from diffmegatron.operations.cluster import without_secrets
    from diffmegatron.operations.launch import (
        log_path,
        prepare_chain,
        prepare_launch,
        submit_chain,
        summary,
    )

    arguments = (config, overrides or [], nodes, cluster, dependency, spares)
    if chain:
        found = prepare_chain(*arguments, needs_data=not dry_run)
    else:
        found = (prepare_launch(*arguments, needs_data=not dry_run),)
    for each in found:
        for line in (*summary(each), *(f"warning: {remark}" for remark in each.remarks)):
            print(line, file=sys.stderr)
    if dry_run:
        for each in found:
            text = without_secrets(each.text, each.job.cluster)
            print(f"==> {each.path} <==\n" if chain else "", text, sep="", end="")
        return
    for each, number in zip(found, submit_chain(found), strict=True):
        print(f"submitted job {number}: {each.path}")
        print(f"  log, when it starts: {log_path(each.path.parent, number)}")
    folder = found[0].path.parent
    print(f"diffmegatron status {shlex.quote(str(folder.parent if chain else folder))}")


def _start_torchrun(
    config: Path,
    overrides: list[str],
    nodes: int,
    cluster: Path,
    rendezvous: str | None,
    *,
    dry_run: bool,
) -> None:
    """Write a start script for torchrun, and run it if there is only one machine."""
    from diffmegatron.operations.cluster import load_cluster, without_secrets
    from diffmegatron.operations.torchrun import torchrun_file, write

    path, text, remarks = torchrun_file(
        config, overrides, nodes, cluster, rendezvous, needs_data=not dry_run
    )
    for remark in remarks:
        print(f"warning: {remark}", file=sys.stderr)
    if dry_run:
        print(without_secrets(text, load_cluster(cluster)), end="")
        return
    write(path, text)
    if nodes > 1:
        print(f"run this on each of the {nodes} machines: bash {shlex.quote(str(path))}")
    else:
        os.execvp("bash", ["bash", str(path)])


def preflight(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Recipe")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides")
    ] = None,
) -> None:
    """Check the nodes of a job in less than a minute.

    Use the same launcher as for training, so that every rank checks its node. Without a launcher,
    only this machine is checked.

    Exit status 71: this node has no GPU, or another problem that not all nodes have. 2: all nodes
    have a problem.
    """
    from diffmegatron.attempts.ends import RankRecord
    from diffmegatron.training.safeguards import exit_on_stop_signal

    record = RankRecord.of_environment()
    with record.write_failures(), exit_on_stop_signal(record):
        from diffmegatron.config.load import load_stages
        from diffmegatron.operations.preflight import check_nodes

        check_nodes(load_stages(config, overrides or []), record.folder)


configs = typer.Typer(
    help="List and copy recipes and launch scripts; describe keys.",
    no_args_is_help=True,
)


@configs.command("list")
def list_configs() -> None:
    """List recipes, cluster files and launch scripts."""
    from diffmegatron.operations import recipes

    for number, (title, names) in enumerate(recipes.groups().items()):
        print(f"{chr(10) * (number > 0)}{title}")
        for name in names:
            print(f"  {name:<38}{recipes.description(name)}".rstrip())


@configs.command("keys")
def describe_keys(
    name: Annotated[
        str | None,
        typer.Argument(metavar="KEY", help="Key or section (optimizer.schedule); all"),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the page docs/keys.md, with all keys")
    ] = False,
) -> None:
    """Describe the keys of a recipe, with their first release.

    Example: diffmegatron configs keys optimizer.schedule
    """
    from diffmegatron.config import keys

    if markdown:
        print(keys.markdown_page(), end="")
        return
    found = keys.recipe_keys() if name is None else keys.find_keys(name)
    print("\n".join(map(keys.describe, found)))


@configs.command("copy")
def copy_configs(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name from 'configs list'")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Default: configs, or launch for launch")
    ] = None,
) -> None:
    """Copy a recipe, a cluster file or the launch scripts.

    With a recipe, the files that it extends are copied too. You can edit the copies in DIR.

    Example: diffmegatron configs copy diff_3b_1t
    """
    from diffmegatron.operations import recipes

    default = Path(recipes.LAUNCH if name == recipes.LAUNCH else "configs")
    for path in recipes.copy(name, folder or default):
        print(path)


def quickstart(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Overrides for every run (training.steps=1000)"),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND[,KEY=VALUE...]",
            help="Kind of attention to train, such as grouped,signal_per_noise=2 (repeatable; "
            "default: the recipe's kind and its baseline)",
        ),
    ] = None,
) -> None:
    """Prepare, train, export and compare two models in minutes.

    The training text is the source code of Python's standard library. The folder runs/quickstart is
    replaced.
    """
    from diffmegatron.operations import quickstart as job

    job.quickstart(attention or [], overrides or [])
