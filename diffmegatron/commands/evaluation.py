"""``evaluate`` runs suites on models, ``generate`` prints texts, ``compare`` compares runs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from diffmegatron.command_options import with_options
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings, GenerateSettings


@with_options(EvaluateSettings)
def evaluate(
    targets: Annotated[
        list[Path],
        typer.Argument(
            metavar="TARGET",
            help="Hugging Face folders, checkpoints, or run_dirs; differences are to the first",
        ),
    ],
    suite: Annotated[
        str, typer.Option(metavar="NAME[,NAME]", help="Suites, listed in docs/reference/suites.md")
    ],
    out: Annotated[Path, typer.Option(help="Directory of results and report")],
    settings: EvaluateSettings,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SUITE.KEY=VALUE", help="Setting of a suite"),
    ] = None,
) -> None:
    """Measure models on suites side by side. The same command resumes an interrupted evaluation.

    The command writes report.html, report.md, results.json, a picture per suite, and the result of
    each target on each item of a suite (such as a question or a text) into OUT.

    Example: diffmegatron evaluate runs/a/hf runs/b/hf --suite loss --data held_out.jsonl --out eval
    """
    from diffmegatron.parallel.launcher import read_launch

    launch = read_launch()
    from diffmegatron.evaluation.evaluate import evaluate as run
    from diffmegatron.evaluation.report_pages import conclusion_lines

    report = run(targets, suite.split(","), out, settings, set_ or [])
    if launch.rank == 0:
        outcome = json.loads((out / "results.json").read_text())
        print("\n".join([*conclusion_lines(outcome), f"wrote {report}"]))


@with_options(GenerateSettings)
def generate(
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="Hugging Face folder, checkpoint, or run_dir"),
    ],
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT", help="Beginnings of texts")],
    settings: GenerateSettings,
) -> None:
    """Print what a model writes after each prompt, token by token.

    A run_dir stands for its newest checkpoint. A checkpoint is exported to a temporary folder.

    Example: diffmegatron generate runs/a/hf 'def fibonacci(n):' --max-tokens 100
    """
    from diffmegatron.parallel.engine_imports import importing_engines
    from diffmegatron.parallel.launcher import read_launch

    read_launch()
    with importing_engines():
        from diffmegatron.evaluation.generate import written_texts

    for part in written_texts(target, prompts, settings):
        print(part, end="", flush=True)


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN_DIR", help="Runs of any recipes, finished or not; all stages of a run"
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory of table and picture")],
) -> None:
    """Compare the recorded metrics of runs by tokens seen.

    The conclusion compares the held-out losses of runs with equal seeds. The command writes curves
    of losses, throughput and lambda into OUT/compare.png, and the conclusion and final values into
    OUT/compare.md and OUT/compare.json.

    Example: diffmegatron compare runs/softmax runs/diff_v1 --out runs/compared
    """
    from rich.console import Console
    from rich.table import Table

    from diffmegatron.evaluation.compare import compare as compare_runs

    conclusion, ((corner, *names), rows) = compare_runs(runs, out)
    print("\n".join(conclusion))
    table = Table(corner)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print(f"wrote {out / 'compare.png'}, compare.md and compare.json")
