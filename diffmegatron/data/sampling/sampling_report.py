"""Tables and a picture of document lengths and of the mixture of sources in a run's samples."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from diffmegatron.data.index.corpus_manifest import LengthBin
from diffmegatron.data.sampling.samples import Samples, SourceSamples
from diffmegatron.files import write_picture


def length_table(samples: Samples) -> str:
    """Return a table of document lengths before and after length up-sampling.

    A row counts the documents of a source with 2**k to 2**(k + 1) - 1 tokens, including the
    end-of-document token, and the share of the source's tokens in them.
    """
    lines = [
        f"{'':<16} {'tokens,':>9} {'documents':>23} {'share of tokens':>17}",
        f"{'source':<16} {'at least':>9} {'before':>11} {'after':>11} {'before':>8} {'after':>8}",
    ]
    for source in samples.sources.values():
        lines += _rows(source)
    return "\n".join(lines)


def _rows(source: SourceSamples) -> list[str]:
    order, name = source.order, Path(source.corpus.prefix).name
    before, after = order.split_lengths, {part.at_least: part for part in order.lengths}
    total_before, total_after = _tokens(before), max(1, _tokens(order.lengths))
    rows = []
    for part in before:
        kept = after.get(part.at_least) or LengthBin(at_least=part.at_least, documents=0, tokens=0)
        rows.append(
            f"{name:<16} {part.at_least:>9,} {part.documents:>11,} {kept.documents:>11,} "
            f"{part.tokens / total_before:>8.2%} {kept.tokens / total_after:>8.2%}"
        )
    return rows


def plot_lengths(samples: Samples, path: Path) -> None:
    """Draw the shares of tokens of :func:`length_table` into a PNG file, one panel per source."""
    # This backend needs no display. The import takes one second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sources = list(samples.sources.values())
    figure = Figure(figsize=(7, 0.6 + 2.2 * len(sources)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(sources), 1, squeeze=False)[:, 0]
    for source, axes in zip(sources, panels, strict=True):
        order = source.order
        for label, bins, offset in (
            ("before", order.split_lengths, -0.2),
            ("after", order.lengths, 0.2),
        ):
            places = [part.at_least.bit_length() - 1 + offset for part in bins]
            shares = [100 * part.tokens / max(1, _tokens(bins)) for part in bins]
            axes.bar(places, shares, width=0.4, label=f"{label} ({_tokens(bins):,} tokens)")
        exponents = [part.at_least.bit_length() - 1 for part in order.split_lengths]
        axes.set_xticks(exponents, [_binary(exponent) for exponent in exponents], fontsize=8)
        axes.set_title(Path(source.corpus.prefix).name, fontsize=10, loc="left")
        axes.set_ylabel("% of tokens")
        axes.legend(fontsize=8, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("tokens of the document, at least")
    write_picture(path, figure, dpi=120)


def mixture_table(samples: Samples, first: int, number: int) -> str:
    """Return a table with the requested and the actual share of samples from each source.

    The requested share is that of the newest weights. The actual share is counted over ``number``
    samples, from the sample ``first`` on.
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
