#!/usr/bin/env python3
"""Show what a recipe feeds the model: decoded samples, the mixture, the lengths of documents.

    tools/inspect_batches.py configs/quickstart.yaml
    tools/inspect_batches.py CONFIG --from-step 1000 --samples 4 --batches 100
    tools/inspect_batches.py CONFIG --lengths lengths.png
    tools/inspect_batches.py configs/diff_3b_math.yaml --stage continuation

In a sample, text that is a label of the loss is plain and text that is masked out of it is dim;
a bar marks where a document begins.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from diffmegatron.cli import quiet_libraries

# ruff: noqa: E402
quiet_libraries()  # before what imports Megatron, which warns of every library it lacks

from diffmegatron.config.load import load_stages
from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import collate
from diffmegatron.data.sampling.document_order import Split
from diffmegatron.data.sampling.samples import Samples, open_samples
from diffmegatron.data.sampling.sampling_report import length_table, mixture_table, plot_lengths
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer
from diffmegatron.errors import UserError


def render(samples: Samples, index: int, tokenizer: Tokenizer, max_tokens: int) -> Text:
    """One sample as text, cut after ``max_tokens``."""
    sample = samples[index]
    counted = collate([sample], samples.config).loss_mask[0].bool().tolist()
    starts = {*sample.starts.tolist()[1:]}
    text = Text(f"sample {index} from {sample.source}", style="bold")
    text.append(f", {len(starts) + 1} documents, {sum(counted)} labels\n", style="not bold")
    run = 0
    labels = [True, *counted][: min(max_tokens, len(sample.tokens))]
    for position in range(1, len(labels) + 1):
        at_end = position == len(labels)
        if at_end or position in starts or labels[position] != labels[run]:
            part = tokenizer.decode(sample.tokens[run:position])
            text.append(part, style="not bold" if labels[run] else "not bold dim")
            run = position
            if position in starts and not at_end:
                text.append("\n┃ ", style="bold cyan")
    return text


def choose(stages: Sequence[Recipe], name: str | None) -> Recipe:
    """The stage of that name, which ends its ``run_dir``; a recipe without stages is one."""
    if len(stages) == 1 and name is None:
        return stages[0]
    names = [Path(stage.run_dir).name for stage in stages] if len(stages) > 1 else []
    if name not in names:
        raise UserError(
            f"the recipe has the stages {', '.join(names)}; give one of them as --stage"
            if names
            else f"the recipe has no stages; leave out --stage {name}"
        )
    return stages[names.index(name)]


def main(
    config: Annotated[Path, typer.Argument(help="Recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    stage: Annotated[str | None, typer.Option(help="Of a recipe with stages.")] = None,
    split: Annotated[Split, typer.Option(help="Which documents.")] = "train",
    from_step: Annotated[int, typer.Option(help="The first optimizer step looked at.")] = 0,
    samples: Annotated[int, typer.Option(help="Samples that are decoded.")] = 2,
    batches: Annotated[int, typer.Option(help="Global batches the mixture is counted over.")] = 10,
    max_tokens: Annotated[int, typer.Option(help="Tokens shown of each sample.")] = 400,
    lengths: Annotated[Path | None, typer.Option(help="Picture of the lengths (PNG).")] = None,
) -> None:
    """Show what a recipe feeds the model."""
    console = Console(highlight=False)
    try:
        recipe = choose(load_stages(config, overrides or []), stage)
        opened = open_samples(recipe.data, recipe.training.seq_length, recipe.training.seed, split)
        tokenizer = load_tokenizer(recipe.data.tokenizer)
    except UserError as error:
        console.print(f"error: {error}", style="red")
        raise typer.Exit(2) from None
    first, size = from_step * recipe.training.global_batch_size, recipe.training.global_batch_size
    for index in range(first, first + samples):
        console.print(render(opened, index, tokenizer, max_tokens), end="\n\n")
    console.print(f"mixture over {batches} batches from step {from_step} on", style="bold")
    console.print(mixture_table(opened, first, batches * size), end="\n\n", soft_wrap=True)
    console.print("lengths of documents, before and after up-sampling", style="bold")
    console.print(length_table(opened), soft_wrap=True)
    if lengths is not None:
        plot_lengths(opened, lengths)
        console.print(f"wrote {lengths}")


if __name__ == "__main__":
    typer.run(main)
