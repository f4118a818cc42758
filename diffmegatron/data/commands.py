"""``diffmegatron data``: merge parts, look after prepared corpora."""

from pathlib import Path
from typing import Annotated

import typer

from diffmegatron.errors import UserError
from diffmegatron.files import shown

app = typer.Typer(help="Merge and verify prepared corpora.", no_args_is_help=True)


@app.command()
def merge(
    prefix: Annotated[
        Path, typer.Argument(metavar="PREFIX", help="As given to prepare with --part K/N")
    ],
) -> None:
    """Make one corpus of all parts of a PREFIX, copying none; reads all tokens once."""
    from diffmegatron.data.prepare.merge_parts import merge as merge_parts

    manifest = merge_parts(prefix)
    name = shown(prefix)
    print(
        f"{name}.idx and .json, of the {len(manifest.parts):,} parts in {name}.parts: "
        f"{manifest.documents:,} documents, {manifest.tokens:,} tokens"
    )
    if manifest.settings.get("deduplicate"):
        print(f"{manifest.duplicates:,} duplicates were dropped within parts, none across them")


@app.command()
def verify(
    prefixes: Annotated[
        list[Path], typer.Argument(metavar="PREFIX", help="As given to prepare: no .bin, no .json")
    ],
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Compare sizes only, which takes no time")
    ] = False,
) -> None:
    """Read every byte and compare the checksums; exit status 1 if anything is damaged."""
    from diffmegatron.data.index.corpus_manifest import read_manifest
    from diffmegatron.data.index.verify_corpus import check_hashes, check_sizes

    damaged = 0
    for prefix in prefixes:
        try:
            manifest = read_manifest(prefix) if sizes else check_hashes(prefix)
            if sizes:
                check_sizes(prefix, manifest)
            print(
                f"{shown(prefix)}: good{' in size' if sizes else ''}, {manifest.documents:,} "
                f"documents, {manifest.tokens:,} tokens"
            )
        except UserError as error:
            damaged += 1
            print(f"{shown(prefix)}: damaged: {error}")
    raise typer.Exit(1 if damaged else 0)
