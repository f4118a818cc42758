"""``diffmegatron launch --torchrun``: write a start script for machines without Slurm."""

import os
import re
import shlex
from collections.abc import Sequence
from itertools import starmap
from pathlib import Path

from diffmegatron.attempts.ledger import ledger_of
from diffmegatron.config.load import load_stages
from diffmegatron.errors import UserError
from diffmegatron.files import explain_os_errors, format_path, shorten, write_durably
from diffmegatron.operations.cluster import Cluster, export_line, load_cluster
from diffmegatron.operations.recipe_checks import check_fit, check_starts, data_remarks
from diffmegatron.own_code import import_environment
from diffmegatron.shipped_files import shipped_folder

SCRIPT = "torchrun.sh"
_ENDPOINT = re.compile(r"[^\s:]+:[0-9]{1,5}")


def torchrun_file(
    config: Path,
    overrides: Sequence[str],
    nodes: int,
    cluster_file: Path,
    rendezvous: str | None,
    *,
    needs_data: bool = True,
) -> tuple[Path, str, list[str]]:
    """Check a recipe, and return the path and the text of a start script, and warnings.

    Nothing is written.

    The script uses ``setup``, ``environment`` and the ranks per node of the cluster file.
    ``rendezvous`` is ``HOST:PORT`` of the first of several machines; None for one machine.
    Unless ``needs_data``, sources of the recipe that are not prepared are only a warning.
    """
    recipes = load_stages(config, overrides)
    cluster = load_cluster(cluster_file)
    check_fit(recipes, nodes, cluster, needs_data=needs_data)
    check_starts(recipes)
    if cluster.container is not None:
        raise UserError(
            f"container {shorten(cluster.container.image)} is entered only under Slurm; remove it "
            "from the cluster file, and start the script inside the container"
        )
    if nodes == 1 and rendezvous is not None:
        raise UserError("--rendezvous is for several machines; leave it out with --nodes 1")
    if nodes > 1 and rendezvous is None:
        raise UserError(
            f"--nodes {nodes} with --torchrun needs --rendezvous; give HOST:PORT of the first "
            "machine"
        )
    if rendezvous is not None and not _ENDPOINT.fullmatch(rendezvous):
        raise UserError(f"--rendezvous is {shorten(rendezvous)!r}; give HOST:PORT")
    arguments = (str(config), *overrides)
    path = ledger_of(recipes).run_dir.absolute() / SCRIPT
    remarks = [remark for recipe in recipes for remark in data_remarks(recipe)]
    return path, _text(arguments, nodes, cluster, rendezvous), remarks


def write(path: Path, text: str) -> None:
    """Write the start script."""
    with explain_os_errors(f"cannot write in {format_path(path.parent)}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, os.fsencode(text))


def _text(arguments: Sequence[str], nodes: int, cluster: Cluster, rendezvous: str | None) -> str:
    script = str(shipped_folder("launch") / SCRIPT)
    settings = {"NNODES": str(nodes), "RANKS": str(cluster.ranks)}
    if rendezvous is not None:
        settings["RENDEZVOUS"] = rendezvous
    variables = cluster.environment | import_environment() | settings
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            "# Written by diffmegatron launch --torchrun. Start it on each machine: bash THIS_FILE",
            f"cd {shlex.quote(str(Path.cwd()))} || exit 2",
            *cluster.setup,
            *starmap(export_line, variables.items()),
            f"exec bash {shlex.join([script, *arguments])}",
            "",
        ]
    )
