"""``diffmegatron evaluate``: suites on models; ``compare``: what runs recorded, side by side."""

from pathlib import Path
from typing import Annotated, Literal

import typer


def evaluate(
    targets: Annotated[
        list[Path],
        typer.Argument(
            metavar="TARGET",
            help="Hugging Face folders, our checkpoints, or run_dirs with one; differences are to "
            "the first",
        ),
    ],
    suite: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="What to measure; docs/evaluation.md")
    ],
    out: Annotated[Path, typer.Option(help="Directory of results and report")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]PATH",
            help="Held-out text: JSONL, Parquet or text files, folders, or a prepared PREFIX",
        ),
    ] = None,
    haystack: Annotated[
        Path | None, typer.Option(help="Text to hide needles in, of the same forms")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder with the files of published data sets")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SUITE.KEY=VALUE", help="A setting of a suite"),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Of weights; auto: that of the files on a GPU, float32 on a CPU"),
    ] = "auto",
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one")
    ] = "auto",
    batch_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Largest number of tokens of a batch  [default: auto]"),
    ] = None,
    engine: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="Library that computes; vllm writes texts of models that it serves"),
    ] = "transformers",
) -> None:
    """Measure models on suites, side by side. Run again, it goes on where it was.

    Writes OUT/report.html, report.md, results.json, a picture per suite, and a line of results
    per suite, target and item.

    Example: diffmegatron evaluate runs/a/hf runs/b/hf --suite loss --data held_out.jsonl --out eval
    """
    from diffmegatron.parallel.launcher import read_launch

    launch = read_launch()
    from diffmegatron.evaluation.evaluate import evaluate as run
    from diffmegatron.evaluation.model import Computing

    given = {"data": tuple(data or ()) or None, "haystack": haystack, "data_dir": data_dir}
    options = {name: value for name, value in given.items() if value is not None}
    computing = Computing(dtype, device, batch_tokens, engine)
    report = run(targets, suite.split(","), out, options, set_ or [], computing)
    if launch.rank == 0:
        print(f"wrote {report}")


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR", help="Of runs of any recipes, finished or not; with stages, of all"
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of table and picture")],
) -> None:
    """Put runs side by side, by tokens seen. Losses, throughput, lambda and final figures.

    Writes OUT/compare.png, compare.md and compare.json from what the runs recorded; reads no
    checkpoint.

    Example: diffmegatron compare runs/diff_v1 runs/softmax --out runs/compared
    """
    from rich.console import Console
    from rich.table import Table

    from diffmegatron.evaluation.compare import compare as compare_runs

    (corner, *names), rows = compare_runs(runs, out)
    table = Table(corner)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(f"wrote {out / 'compare.png'}, compare.md and compare.json")
