"""Show the data that a recipe feeds to the model: samples, mixture, document lengths."""

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
from diffmegatron.files import check_replaceable, shown

# Brackets around text without loss, because a pipe or a file cannot show dim text.
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
    """Yield paragraphs of text to print.

    Args:
        recipe: recipe of one run.
        split: split of the documents.
        from_step: first optimizer step to inspect.
        samples: number of samples to decode.
        batches: number of global batches to count the mixture over.
        max_tokens: number of tokens to show of each sample.
        lengths: PNG file for a picture of document lengths, or None.

    Raises:
        UserError: a corpus or the tokenizer cannot be read.
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
        yield Text(f"wrote {shown(lengths)}")


def decoded(samples: Samples, index: int, tokenizer: Tokenizer, max_tokens: int) -> Text:
    """Return a sample as text of at most ``max_tokens``; text without loss is dim, in brackets."""
    sample = samples[index]
    counted = collate([sample], samples.config).loss_mask[0].bool().tolist()
    starts = {*sample.starts.tolist()[1:]}
    text = Text(f"sample {index} from {sample.source}", style="bold")
    text.append(f", {len(starts) + 1} documents, {sum(counted)} labels\n", style="not bold")
    run = 0
    # The first token is never a label; it is shown like the token after it.
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
    """Return the stage of this name; its name is the last folder of its ``run_dir``.

    Raises:
        UserError: no stage has this name, or a recipe with several stages needs one.
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
