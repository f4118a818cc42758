"""The samples of a run: an infinite order that (seed, weights, files) alone decide.

``samples[i]`` is a function of i: nothing of it depends on ranks, batch sizes or workers, and
position in the data is one number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diffmegatron.config.data import DataConfig
from diffmegatron.data.documents import DocumentOrder, Selection, Split, open_order
from diffmegatron.data.mixture import Mixture
from diffmegatron.data.permutation import derive_key, permute
from diffmegatron.data.store import Corpus, check_tokenizer, open_corpus
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError


@dataclass(frozen=True)
class Sample:
    """One sequence and the token after it.

    Attributes:
        tokens: int64 ``[s + 1]``; the inputs are ``[:-1]``, the labels ``[1:]``.
        starts: positions at which a document begins, the first always 0.
        source: number of the source it comes from.
    """

    tokens: np.ndarray
    starts: list[int]
    source: int


class SourceSamples:
    """One source's documents, concatenated and cut.

    The stream of all its documents repeats for ever; block b holds its tokens from b s on. An
    epoch is the blocks that begin in one pass over the stream; they are shuffled within it, anew
    in each. So every token is the input of exactly one block per pass, and none is dropped at the
    seam.
    """

    def __init__(self, corpus: Corpus, order: DocumentOrder, seq_length: int, key: int) -> None:
        self.corpus, self.order, self.seq_length, self._key = corpus, order, seq_length, key

    def block(self, index: int) -> int:
        """Which block of the stream the source's ``index``-th sample is."""
        seq_length, tokens = self.seq_length, self.order.tokens
        epoch = index * seq_length // tokens
        first = -(-epoch * tokens // seq_length)
        size = -(-(epoch + 1) * tokens // seq_length) - first
        return first + permute(index - first, size, derive_key(self._key, epoch))

    def read(self, index: int) -> tuple[np.ndarray, list[int]]:
        """Tokens int64 ``[s + 1]`` of the ``index``-th sample and where documents begin in it."""
        order, corpus = self.order, self.corpus
        itemsize = corpus.tokens.itemsize
        position = self.block(index) * self.seq_length % order.tokens
        # An int64 of numpy's: searchsorted would convert the whole array to another type.
        number = int(np.searchsorted(order.ends, np.int64(position), side="right"))
        skipped = position - (int(order.ends[number - 1]) if number else 0)
        tokens = np.empty(self.seq_length + 1, dtype=np.int64)
        starts: list[int] = []
        filled = 0
        while filled < len(tokens):
            document = order.documents[number]
            first = int(corpus.offsets[document]) // itemsize + skipped
            length = min(int(corpus.lengths[document]) - skipped, len(tokens) - filled)
            tokens[filled : filled + length] = corpus.tokens[first : first + length]
            starts.append(filled)
            filled += length
            skipped = 0
            number = (number + 1) % len(order.documents)
        return tokens, starts


class Samples(Sequence[Sample]):
    """The global order of a run (see the module); as long as anyone asks."""

    def __init__(self, sources: list[SourceSamples], mixture: Mixture) -> None:
        self.sources, self.mixture = sources, mixture

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]
        source, local = self.mixture.locate(index)
        tokens, starts = self.sources[source].read(local)
        return Sample(tokens, starts, source)

    def __len__(self) -> int:
        raise TypeError("samples have no end: sources repeat")


def open_samples(config: DataConfig, seq_length: int, seed: int, split: Split) -> Samples:
    """Open the sources of a recipe.

    The first call fills the index cache; later ones, on any rank, open it. Held-out splits hang
    on ``config.split_seed`` and not on ``seed``: runs with other seeds are measured on the same
    documents in the same order.

    Args:
        config: the ``data`` section.
        seq_length: tokens s per sample.
        seed: decides the order of the training split.
        split: ``train``, ``validation`` or ``test``.

    Raises:
        UserError: a source is missing, damaged or of another tokenizer, weights do not make a
            mixture, or no source has a document in the split.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    order_seed = seed if split == "train" else config.split_seed
    selection = Selection(
        split, config.validation_fraction, config.test_fraction, config.split_seed, order_seed
    )
    sources, weights = [], []
    for source in config.sources:
        corpus = open_corpus(source.path)
        check_tokenizer(corpus, tokenizer)
        order = open_order(corpus, selection, config.cache_dir)
        key = derive_key("samples", corpus.manifest.content, split, order_seed)
        sources.append(SourceSamples(corpus, order, seq_length, key))
        weights.append(source.weight if order.tokens else 0.0)
    if not any(source.order.tokens for source in sources):
        raise UserError(
            f"no source has a document in the {split} split; "
            f"data.validation_fraction is {config.validation_fraction:g} and "
            f"data.test_fraction {config.test_fraction:g}"
        )
    return Samples(sources, Mixture(weights))
