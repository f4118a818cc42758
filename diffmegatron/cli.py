"""The command line: one screen, each command a call into its package."""

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from diffmegatron.checkpoint.commands import app as checkpoint_app
from diffmegatron.data.commands import app as data_app
from diffmegatron.dex.commands import app as dex_app
from diffmegatron.errors import UserError
from diffmegatron.evaluation.commands import compare, evaluate
from diffmegatron.operations.commands import app as attempt_app
from diffmegatron.operations.commands import configs as configs_app
from diffmegatron.operations.commands import launch, preflight, quickstart, status
from diffmegatron.own_code import ask_for
from diffmegatron.user_paths import named_on_the_command_line, print_any_name

app = typer.Typer(
    name="diffmegatron",
    help="Train Differential Transformers at scale, from text to an exact Hugging Face export.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain text: frames would cost as much time as all else that help does.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(quickstart)
app.command()(launch)
app.command()(preflight)
app.command()(status)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(attempt_app, name="attempt")
app.add_typer(configs_app, name="configs")
app.add_typer(data_app, name="data")
app.add_typer(dex_app, name="dex")
app.command()(evaluate)
app.command()(compare)
Config = Annotated[
    Path,
    typer.Argument(metavar="CONFIG", help="Recipe, a YAML file such as configs/quickstart.yaml"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides such as optimizer.lr=1e-3", metavar="KEY=VALUE"),
]


def _print_version(asked: bool) -> None:
    if asked:
        from diffmegatron import __version__

        print(f"diffmegatron {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and exit"),
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="FILE_OR_MODULE",
            help="Import your own kind of attention or hook first; may be given several times",
        ),
    ] = None,
) -> None:
    ask_for(imports or [])


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    gpus: Annotated[
        int | None, typer.Option(help="Ranks; default: the fewest that fill the layout")
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="GPU that times and memory are for, such as A100, H100 or H200")
    ] = "H100",
    search: Annotated[
        int | None,
        typer.Option(metavar="GPUS", help="Rank the layouts of this many GPUs instead"),
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option("--rehearse", help="Run two steps of the layout, small, on this CPU instead"),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables")] = False,
) -> None:
    """Say what a recipe needs and takes, without a GPU. Or rank layouts, or rehearse one.

    Printed are parameters, FLOPs, memory and communication per rank, and an estimate of the time.
    """
    from diffmegatron import plan as planning
    from diffmegatron.config.load import load_stages

    if rehearse and (as_json or search is not None):
        raise UserError("--rehearse runs a layout; give it without --search and --json")
    if search is not None and gpus is not None:
        raise UserError(
            f"--search {search} ranks layouts of that many GPUs; give it without --gpus {gpus}"
        )
    stages = load_stages(config, overrides or [], to_plan=True)
    # Beside what is printed, which may be JSON.
    for sentence in dict.fromkeys(stage.model.attention.assumption for stage in stages):
        if sentence is not None:
            print(f"assumed: {sentence}", file=sys.stderr)
    if rehearse:
        from diffmegatron.plan.rehearse import rehearse as rehearse_stages

        rehearse_stages(stages, gpus)
    elif search is not None:
        planning.run_search(stages, search, hardware=hardware, as_json=as_json)
    else:
        planning.run(stages, gpus, hardware=hardware, as_json=as_json)


@app.command()
def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT", help="JSONL (.gz, .zst), Parquet, text files, or folders of them"
        ),
    ],
    output: Annotated[
        Path, typer.Option(help="PREFIX: writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    ],
    tokenizer: Annotated[
        str,
        typer.Option(
            help="cl100k_base (its file from the folder DIFFMEGATRON_TIKTOKEN), bytes, a .tiktoken "
            "file, or a Hugging Face folder or its tokenizer.json"
        ),
    ] = "cl100k_base",
    text_field: Annotated[
        str, typer.Option(help="JSON key or Parquet column of the text")
    ] = "text",
    pattern: Annotated[str, typer.Option(help="Which files of a folder count")] = "*",
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenise")] = 1,
    layout: Annotated[
        Literal["text", "instruction", "chat", "template"],
        typer.Option(
            help="text; for fine-tuning (prompts carry no loss) instruction, chat as ChatML, or "
            "chat by the tokenizer's own template"
        ),
    ] = "text",
    prompt_field: Annotated[str, typer.Option(help="Of layout instruction")] = "prompt",
    response_field: Annotated[str, typer.Option(help="Of layout instruction")] = "response",
    messages_field: Annotated[str, typer.Option(help="Of layouts chat and template")] = "messages",
    id_field: Annotated[
        str | None, typer.Option(help="Key that names a document in the rejects file")
    ] = None,
    deduplicate: Annotated[
        bool, typer.Option("--deduplicate", help="Drop documents equal to an earlier one")
    ] = False,
    max_document_bytes: Annotated[int, typer.Option(min=1, help="Reject longer documents")] = 1
    << 26,
    max_reject_share: Annotated[
        float, typer.Option(min=0, max=1, help="Refuse the corpus if more documents are unusable")
    ] = 0.05,
    part: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="Part K of N alone, for 'diffmegatron data merge'"),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Drop unfinished work of other inputs or settings")
    ] = False,
) -> None:
    """Tokenise a corpus into the files that training reads. Run again, it goes on where it was."""
    from diffmegatron.data.prepare.parts import Part
    from diffmegatron.data.prepare.prepare import prepare as prepare_corpus
    from diffmegatron.files import shown

    chosen = None if part is None else Part.parse(part)
    manifest = prepare_corpus(
        inputs,
        output,
        tokenizer,
        text_field,
        workers=workers,
        pattern=pattern,
        layout=layout,
        prompt_field=prompt_field,
        response_field=response_field,
        messages_field=messages_field,
        id_field=id_field,
        deduplicate=deduplicate,
        max_document_bytes=max_document_bytes,
        max_reject_share=max_reject_share,
        part=chosen,
        restart=restart,
    )
    name = shown(output if chosen is None else chosen.prefix(output))
    print(
        f"{name}.bin, .idx and .json: {manifest.documents:,} documents, {manifest.tokens:,} "
        f"tokens of {len(manifest.inputs):,} files; {manifest.rejected:,} rejected"
        f"{f' (see {name}.rejects.jsonl)' if manifest.rejected else ''}, "
        f"{manifest.duplicates:,} duplicates, {manifest.empty:,} empty"
    )


@app.command()
def train(config: Config, overrides: Overrides = None) -> None:
    """Train a recipe, alone or under torchrun. Goes on from the newest checkpoint of run_dir.

    Exit status 0: all steps are done, saved and evaluated.

    75: asked to stop by a signal or the job's time limit; saved, to be started again.

    2: a mistake, a run that the guard stopped or a last save that failed, said in one sentence.

    69: ranks that did not arrive, which another start may find.

    1: a crash, or a hang that the watchdog ended.
    """
    from diffmegatron import api
    from diffmegatron.attempts.ends import EXIT_STOPPED, RankRecord
    from diffmegatron.config.load import load_stages
    from diffmegatron.training.fault_tolerance.safeguards import stopping_at_once

    with RankRecord.of_environment() as record, stopping_at_once(record):
        stages = load_stages(config, overrides or [])
        # After the recipe: torch, Megatron and DeepSpeed take seconds, a mistyped key needs none.
        if not api.train(stages, record=record):
            raise typer.Exit(EXIT_STOPPED)


@app.command()
def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Such as RUN_DIR/checkpoints/step_00001000; of a RUN_DIR its newest",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create")],
    verify: Annotated[bool, typer.Option(help="Load what was written and compare logits")] = True,
) -> None:
    """Write a checkpoint for Hugging Face, and prove it right. Compares logits."""
    from diffmegatron import api

    verified = api.export(checkpoint, out, verify=verify)
    print(f"wrote {out}")
    if verified is not None:
        print(verified)


@app.command("import")
def import_(
    folder: Annotated[
        Path,
        typer.Argument(metavar="HF_DIR", help="Folder of a pretrained model: config.json and all"),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to create")],
    vocab_multiple: Annotated[
        int,
        typer.Option(min=1, help="Pad the vocabulary to a multiple, for tensor-parallel ranks"),
    ] = 1,
    verify: Annotated[bool, typer.Option(help="Compare logits with those of transformers")] = True,
) -> None:
    """Write a Hugging Face model as a run to start from. Proves that it is the same.

    Then train another run from it: a recipe that says "extends: OUT/recipe.yaml", its own run_dir
    and data, and checkpoint.start_from: OUT.

    Example: diffmegatron import SmolLM2-135M runs/smollm2
    """
    from diffmegatron.parallel.engine_imports import importing_engines
    from diffmegatron.parallel.launcher import read_launch

    read_launch()
    with importing_engines():
        from diffmegatron.hf.import_model import import_model

    verified = import_model(folder, out, vocab_multiple=vocab_multiple, verify=verify)
    print(f"wrote {out}")
    if verified is not None:
        print(verified)


@app.command()
def doctor() -> None:
    """Say what is installed, and what is missing. Which backend each choice falls to, and why."""
    from diffmegatron import doctor as examination

    examination.run()


def main() -> None:
    """Run the command line; a mistake of the user's is one sentence and exit status 2."""
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    print_any_name()
    try:
        with named_on_the_command_line(sys.argv[1:]):
            app()
    except UserError as error:
        print(
            f"error: {error}" if rank == "0" else f"error (rank {rank}): {error}", file=sys.stderr
        )
        sys.exit(error.exit_status)
