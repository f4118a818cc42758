"""``diffmegatron dex``: select the heads for DEX, differential extension of pretrained models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Select the heads of a pretrained model that DEX extends.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    pass


@app.command()
def select(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint or RUN_DIR")],
    data: Annotated[Path, typer.Option(metavar="PREFIX", help="Prepared text for calibration")],
    out: Annotated[Path, typer.Option(help="File to write, such as heads.yaml")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides such as parallel.tensor=2", metavar="KEY=VALUE"),
    ] = None,
    method: Annotated[
        Literal["entropy", "gradient"],
        typer.Option(help="Select heads of high attention entropy, or of low importance"),
    ] = "entropy",
    share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of each layer's heads (at least one head)")
    ] = 0.5,
    sequences: Annotated[
        int, typer.Option(min=1, help="Number of sequences of training.seq_length tokens")
    ] = 64,
) -> None:
    """Score every head of a model and write the selected heads to OUT.

    Run the command as one process, or under torchrun with overrides such as parallel.tensor=2. The
    scores of all heads (.scores.json) and a picture (.png) are written beside OUT.
    """
    from diffmegatron.parallel.launcher import check_launch

    check_launch()
    from diffmegatron.dex.select_heads import select_heads

    selection = select_heads(
        model, data, out, overrides or [], method=method, share=share, sequences=sequences
    )
    if selection is not None:
        print(f"wrote {out}: {selection}")
