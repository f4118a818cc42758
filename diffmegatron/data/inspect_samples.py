"""``diffmegatron data inspect``: show samples, source shares and document lengths of a recipe."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.text import Text

from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import LengthBin, length_histogram
from diffmegatron.data.loader import collate
from diffmegatron.data.sampling.document_order import Split, select_split
from diffmegatron.data.sampling.samples import Samples, SourceSamples, open_samples
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.files import check_replaceable, format_path, write_picture

# Brackets around tokens without loss, because the dim style is visible only on a terminal.
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

    Samples and mixture begin at optimizer step ``from_step``. The mixture is counted over
    ``batches`` global batches. ``lengths`` is the PNG file for a plot of lengths; None: no plot.
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
    title = "lengths of documents without end tokens, before and after up-sampling\n"
    yield Text(title, style="bold").append(length_table(opened), style="not bold")
    if lengths is not None:
        plot_lengths(opened, lengths)
        yield Text(f"wrote {format_path(lengths)}")


def decoded(samples: Samples, index: int, tokenizer: Tokenizer, max_tokens: int) -> Text:
    """Return a line about a sample, followed by its first ``max_tokens`` tokens as text.

    Tokens without loss are dim and in brackets. Each document after the first begins a new line,
    and so does padding, of which only the number of tokens is shown.
    """
    sample = samples[index]
    counted = collate([sample], samples.config).loss_mask[0].bool().tolist()
    starts = {*sample.starts.tolist()[1:]} - {sample.filled}
    documents, padding = len(starts) + 1, len(sample.tokens) - sample.filled
    text = Text(f"sample {index} from {sample.source}", style="bold")
    text.append(
        f", {documents} document{'s' * (documents > 1)}, {sum(counted)} labels\n", style="not bold"
    )
    # The first token of a sample is never a label, so it is shown in the style of the second token.
    labels = [*counted[:1], *counted][: min(max_tokens, sample.filled)]
    changes = (n for n in range(1, len(labels)) if n in starts or labels[n] != labels[n - 1])
    for begin, end in pairwise([0, *changes, len(labels)]):
        if begin in starts:
            text.append("\n┃ ", style="bold cyan")
        part = tokenizer.decode(sample.tokens[begin:end])
        if labels[begin]:
            text.append(part, style="not bold")
        else:
            text.append(f"{_MASKED[0]}{part}{_MASKED[1]}", style="not bold dim")
    if padding and sample.filled < max_tokens:
        text.append("\n┃ ", style="bold cyan")
        text.append(f"({padding} tokens of padding)", style="not bold dim")
    return text


def length_table(samples: Samples) -> str:
    """Return a table of document lengths before and after length up-sampling.

    Each row has the number of a source's documents of 2**k to 2**(k + 1) - 1 tokens, and their
    share of the tokens. As for ``data.upsampling.long_tokens``, no end-of-document token counts.
    """
    lines = [
        f"{'':<16} {'tokens,':>9} {'documents':>23} {'share of tokens':>17}",
        f"{'source':<16} {'at least':>9} {'before':>11} {'after':>11} {'before':>8} {'after':>8}",
    ]
    for source in samples.sources.values():
        name = Path(source.corpus.prefix).name
        before, kept_bins = _histograms(source)
        after = {part.at_least: part for part in kept_bins}
        total_before, total_after = _tokens(before), max(1, _tokens(kept_bins))
        for part in before:
            kept = after.get(part.at_least, LengthBin(at_least=1, documents=0, tokens=0))
            lines.append(
                f"{name:<16} {part.at_least:>9,} {part.documents:>11,} {kept.documents:>11,} "
                f"{part.tokens / total_before:>8.2%} {kept.tokens / total_after:>8.2%}"
            )
    return "\n".join(lines)


def _histograms(source: SourceSamples) -> list[tuple[LengthBin, ...]]:
    """Return the length histograms before and after length up-sampling."""
    lengths, order = source.corpus.lengths, source.order
    split = select_split(len(lengths), order.selection)
    # Every document ends with an end-of-document token.
    return [
        length_histogram([np.maximum(1, lengths[documents].astype(np.int64) - 1)])
        for documents in (split, order.documents)
    ]


def plot_lengths(samples: Samples, path: Path) -> None:
    """Draw the token shares of :func:`length_table` into a PNG file, one panel per source."""
    # The Agg backend needs no display. The import takes one second, so it is done only here.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sources = list(samples.sources.values())
    figure = Figure(figsize=(7, 0.6 + 2.2 * len(sources)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sources), 1, squeeze=False)[:, 0]
    for source, axes in zip(sources, panels, strict=True):
        before, after = _histograms(source)
        for label, bins, offset in (("before", before, -0.2), ("after", after, 0.2)):
            places = [part.at_least.bit_length() - 1 + offset for part in bins]
            shares = [100 * part.tokens / max(1, _tokens(bins)) for part in bins]
            axes.bar(places, shares, width=0.4, label=f"{label} ({_tokens(bins):,} tokens)")
        exponents = [part.at_least.bit_length() - 1 for part in before]
        axes.set_xticks(exponents, [_binary(exponent) for exponent in exponents], fontsize=8)
        axes.set_title(Path(source.corpus.prefix).name, fontsize=10, loc="left")
        axes.set_ylabel("% of tokens")
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens of the document, at least")
    write_picture(path, figure, dpi=120)


def mixture_table(samples: Samples, first: int, number: int) -> str:
    """Return a table with the requested and the actual share of samples from each source.

    The requested shares are the weights in ``samples.history.periods[-1]``, divided by their sum.
    The actual shares are counted over ``number`` samples from sample ``first`` on.
    """
    actual = Counter(samples[index].source for index in range(first, first + number))
    weights = samples.history.periods[-1].sources
    total = sum(source.weight for source in weights)
    lines = [f"{'source':<50} {'requested':>9} {'actual':>9}"]
    lines += [
        f"{source.path:<50} {source.weight / total:>9.3%} {actual[source.path] / number:>9.3%}"
        for source in weights
    ]
    return "\n".join(lines)


def _binary(exponent: int) -> str:
    """Return 2**exponent as text such as 512, 4K or 1M."""
    unit = min(2, exponent // 10)
    return f"{1 << exponent - 10 * unit}{('', 'K', 'M')[unit]}"


def _tokens(bins: Sequence[LengthBin]) -> int:
    return sum(part.tokens for part in bins)


def choose_stage(stages: Sequence[Recipe], name: str | None) -> Recipe:
    """Return the recipe whose ``run_dir`` ends with the folder ``name``.

    If there is only one recipe, ``name`` must be None, and this recipe is returned.
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
