"""Command line of diffmegatron: the commands of ``commands/``, and its errors."""

import io
import logging
import os
import sys
from typing import Annotated

import typer

from diffmegatron.commands import checkpoint, data, dex, evaluation, jobs, models
from diffmegatron.errors import UserError
from diffmegatron.files import escape
from diffmegatron.own_code import import_requested
from diffmegatron.user_paths import explain_path_errors

app = typer.Typer(
    name="diffmegatron",
    help="Train Differential Transformers at scale, from text to an exact Hugging Face export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text, because the frames that rich draws would double the time of --help.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(jobs.quickstart, jobs.launch, jobs.preflight, jobs.status),
    *(models.plan, models.tune, data.prepare, models.train, models.export, models.import_),
    *(evaluation.evaluate, evaluation.generate, evaluation.compare, models.doctor),
):
    app.command(command.__name__.removesuffix("_"))(command)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(jobs.app, name="attempt")
app.add_typer(jobs.configs, name="configs")
app.add_typer(data.app, name="data")
app.add_typer(dex.app, name="dex")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from diffmegatron import __version__

        print(f"diffmegatron {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit"
        ),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE_OR_MODULE",
            help="Import your own kind of attention or hook first (repeatable)",
        ),
    ] = None,
) -> None:
    import_requested(imports or [])


def main() -> None:
    """Run the command line; print a :class:`UserError` as one sentence, without a traceback."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Undecodable bytes of file names are escaped, as standard error does.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with explain_path_errors(sys.argv[1:]):
            app()
    except UserError as error:
        name = "error" if rank == "0" else f"error (rank {rank})"
        print(f"{name}: {escape(str(error))}", file=sys.stderr)
        sys.exit(error.exit_status)
