"""``diffmegatron data inspect``: show samples, source shares and document lengths of a recipe."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.text import Text

from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import collate
from diffmegatron.data.sampling.document_order import Split
from diffmegatron.data.sampling.samples import Samples, open_samples
from diffmegatron.data.sampling.sampling_report import length_table, mixture_table, plot_lengths
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import check_replaceable, format_path

# Brackets around tokens without loss. They are also dim, but a pipe or a file loses this style.
_MASKED = "⟦", "⟧"


def inspect(
    recipe: Recipe,
    split: Split,
    from_step: int,
    samples: int,
    batches: int,
    max_tokens: int,
    lengths: Path | None,
) -> Iterator[Text]:
    """Yield the paragraphs to print: samples, table of the mixture, table of document lengths.

    Args:
        from_step: first optimizer step to inspect.
        samples: number of samples to decode.
        batches: number of global batches over which the mixture is counted.
        max_tokens: maximum number of tokens to show of each sample.
        lengths: PNG file in which to draw the document lengths; None: no file is written.

    Raises:
        OSError: the PNG cannot be written.
    """
    if lengths is not None:
        check_replaceable(lengths)
    training = recipe.training
    opened = open_samples(recipe.data, training.seq_length, training.seed, split)
    tokenizer = load_tokenizer(recipe.data.tokenizer)
    size = training.global_batch_size
    first = from_step * size
    for index in range(first, first + samples):
        yield decoded(opened, index, tokenizer, max_tokens)
    title = f"mixture over {batches} batches from step {from_step} on\n"
    yield Text(title, style="bold").append(
        mixture_table(opened, first, batches * size), style="not bold"
    )
    title = "lengths of documents, before and after up-sampling\n"
    yield Text(title, style="bold").append(length_table(opened), style="not bold")
    if lengths is not None:
        plot_lengths(opened, lengths)
        yield Text(f"wrote {format_path(lengths)}")


def decoded(samples: Samples, index: int, tokenizer: Tokenizer, max_tokens: int) -> Text:
    """Return a line about a sample, followed by its first ``max_tokens`` tokens as text.

    Tokens without loss are dim and in brackets. Each document after the first begins a new line.
    """
    sample = samples[index]
    counted = collate([sample], samples.config).loss_mask[0].bool().tolist()
    starts = {*sample.starts.tolist()[1:]}
    text = Text(f"sample {index} from {sample.source}", style="bold")
    text.append(f", {len(starts) + 1} documents, {sum(counted)} labels\n", style="not bold")
    run = 0
    # The first token of a sample is never a label, so it is shown in the style of the second token.
    labels = [*counted[:1], *counted][: min(max_tokens, len(sample.tokens))]
    for position in range(1, len(labels) + 1):
        at_end = position == len(labels)
        if at_end or position in starts or labels[position] != labels[run]:
            part = tokenizer.decode(sample.tokens[run:position])
            if labels[run]:
                text.append(part, style="not bold")
            else:
                text.append(f"{_MASKED[0]}{part}{_MASKED[1]}", style="not bold dim")
            run = position
            if position in starts and not at_end:
                text.append("\n┃ ", style="bold cyan")
    return text


def choose_stage(stages: Sequence[Recipe], name: str | None) -> Recipe:
    """Return the recipe of the stage whose ``run_dir`` ends with the folder ``name``.

    ``stages`` is the result of :func:`~diffmegatron.config.load.load_stages`.
    """
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
