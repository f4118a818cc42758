"""``diffmegatron prepare`` and ``diffmegatron data``: write, inspect, merge and verify corpora."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from diffmegatron.command_options import with_options
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.errors import UserError
from diffmegatron.files import format_path

app = typer.Typer(
    help="Inspect a recipe's data; merge and verify prepared corpora.", no_args_is_help=True
)


@app.command()
def inspect(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Recipe")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides, as for train")
    ] = None,
    stage: Annotated[
        str | None, typer.Option(help="Stage to inspect, of a recipe with stages")
    ] = None,
    split: Annotated[
        Literal["train", "validation", "test"], typer.Option(help="Split of the documents")
    ] = "train",
    from_step: Annotated[int, typer.Option(min=0, help="First optimizer step to inspect")] = 0,
    samples: Annotated[int, typer.Option(min=0, help="Number of samples to decode")] = 2,
    batches: Annotated[
        int, typer.Option(min=1, help="Number of global batches to count the mixture over")
    ] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to show of each sample")] = 400,
    lengths: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the lengths of documents")
    ] = None,
) -> None:
    """Show the data that a recipe feeds to the model.

    Samples, shares of the sources and document lengths are printed. Text with loss is plain, ⟦text
    without loss⟧ is dim, and a bar marks the start of a document.

    Example: diffmegatron data inspect configs/quickstart.yaml --from-step 1000 --samples 4
    """
    from rich.console import Console

    from diffmegatron.config.load import load_stages
    from diffmegatron.data import inspect_samples

    if Path(f"{config}.idx").exists():
        raise UserError(
            f"{format_path(config)} is a prepared corpus; give a recipe with it in data.sources"
        )
    recipe = inspect_samples.choose_stage(load_stages(config, overrides or []), stage)
    console = Console(highlight=False)
    for paragraph in inspect_samples.inspect(
        recipe, split, from_step, samples, batches, max_tokens, lengths
    ):
        console.print(paragraph, end="\n\n", soft_wrap=True)


@app.command()
def merge(
    prefix: Annotated[
        Path, typer.Argument(metavar="PREFIX", help="PREFIX given to prepare with --part K/N")
    ],
) -> None:
    """Join the parts of a corpus that prepare --part wrote.

    PREFIX.idx and PREFIX.json are written for the whole corpus. The tokens are read once to compute
    a checksum, but not copied: they stay in PREFIX.parts, so keep that folder.
    """
    from diffmegatron.data.prepare.parts import merge as merge_parts

    manifest = merge_parts(prefix)
    name = format_path(prefix)
    print(
        f"{name}.idx and .json, of the {len(manifest.parts):,} parts in {name}.parts: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens"
    )
    if manifest.settings.get("deduplicate"):
        print(f"{manifest.duplicates:,} duplicates were dropped within parts, none across them")


@app.command()
def verify(
    prefixes: Annotated[
        list[Path], typer.Argument(metavar="PREFIX", help="PREFIX given to prepare")
    ],
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Compare sizes only, without reading the files")
    ] = False,
) -> None:
    """Compare prepared corpora with their recorded checksums.

    The exit status is 1 if a corpus is damaged.
    """
    from diffmegatron.data.index.corpus_manifest import (
        check_hashes,
        check_sizes,
        read_corpus_manifest,
    )

    damaged = 0
    for prefix in prefixes:
        try:
            manifest = read_corpus_manifest(prefix) if sizes else check_hashes(prefix)
            if sizes:
                check_sizes(prefix, manifest)
            print(
                f"{format_path(prefix)}: good{' in size' if sizes else ''}, {manifest.documents:,} "
                f"documents, {manifest.tokens:,} tokens"
            )
        except UserError as error:
            damaged += 1
            print(f"{format_path(prefix)}: damaged: {error}")
    raise typer.Exit(1 if damaged else 0)


@with_options(PrepareSettings)
def prepare(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT", help="JSONL (.gz, .zst), Parquet, text files, or folders of them"
        ),
    ],
    settings: PrepareSettings,
    output: Annotated[
        Path, typer.Option(help="PREFIX: writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    ],
    pattern: Annotated[str, typer.Option(help="Files to read of a folder, such as '*.py'")] = "*",
    workers: Annotated[int, typer.Option(min=1, help="Processes that tokenise")] = 1,
    part: Annotated[
        str | None,
        typer.Option(
            metavar="K/N", help="Prepare only part K of N; 'diffmegatron data merge' joins them"
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Drop unfinished work of other inputs or settings"),
    ] = False,
) -> None:
    """Tokenise a corpus into the files that training reads.

    To resume an interrupted preparation, run the same command again.
    """
    from diffmegatron.data.prepare.parts import Part
    from diffmegatron.data.prepare.prepare import prepare_corpus

    chosen = None if part is None else Part.parse(part)
    manifest = prepare_corpus(
        inputs,
        output,
        settings,
        workers=workers,
        pattern=pattern,
        part=chosen,
        restart=restart,
    )
    name = format_path(output if chosen is None else chosen.prefix(output))
    print(
        f"{name}.bin, .idx and .json: {manifest.documents:,} documents, {manifest.tokens:,} "
        f"tokens of {len(manifest.inputs):,} files; {manifest.rejected:,} rejected"
        f"{f' (see {name}.rejects.jsonl)' if manifest.rejected else ''}, "
        f"{manifest.duplicates:,} duplicates, {manifest.empty:,} empty"
    )
