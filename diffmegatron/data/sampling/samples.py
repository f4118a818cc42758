"""Samples of a run in a fixed order.

The seed, the sequence length and the section ``data`` of the recipe determine the order. The number
of ranks and the batch sizes have no effect. With ``data.on_exhausted: repeat``, the order is
infinite.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.index.token_store import Corpus, check_tokenizer, open_corpus
from diffmegatron.data.sampling.document_order import DocumentOrder, Selection, Split, open_order
from diffmegatron.data.sampling.mixture import MixtureHistory, Period, SourceWeight
from diffmegatron.data.sampling.permutation import derive_key, permute
from diffmegatron.data.sampling.sequences import Blocks, Pieces, open_blocks
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError


@dataclass(frozen=True)
class Sample:
    """Training sample: a sequence of s tokens and the token after it."""

    tokens: np.ndarray  # int64 [s + 1]: tokens[:-1] are the inputs, tokens[1:] the labels
    starts: np.ndarray  # int64 [n]: index in tokens where each document or padding begins
    loss_mask: np.ndarray | None  # bool [s + 1]: True for labels with loss; None if all have loss
    source: str  # prefix of the corpus
    filled: int  # number of tokens before the padding; s + 1 without padding


@dataclass(frozen=True)
class SourceSamples:
    """Samples of one source: the blocks of each epoch, in a new random order for each epoch.

    A block is one sequence (:class:`~diffmegatron.data.sampling.sequences.Blocks`). It belongs to
    the epoch (pass over the documents) in which it begins. ``key`` selects the random orders.
    Without ``repeat``, only blocks that lie completely within the first epoch are samples.
    """

    corpus: Corpus
    order: DocumentOrder
    blocks: Blocks
    seq_length: int
    key: int
    repeat: bool

    def block(self, index: int) -> int:
        """Return the number of the block that is sample ``index`` of this source."""
        epoch = self.blocks.epoch(index)
        first = self.blocks.first_block(epoch)
        size = self.blocks.blocks_in_one_epoch
        if self.repeat:
            size = self.blocks.first_block(epoch + 1) - first
        return first + permute(index - first, size, derive_key(self.key, epoch))

    def __getitem__(self, index: int) -> Sample:
        pieces = self.blocks.pieces(self.block(index))
        tokens = np.empty(self.seq_length + 1, dtype=np.int64)
        ends = np.cumsum(pieces.lengths)
        filled = int(ends[-1])
        firsts = self.corpus.offsets[pieces.documents] // self.corpus.tokens.itemsize
        firsts += pieces.starts
        # If the index was damaged after the document order was cached, pieces may be wrong.
        inside = (firsts >= 0) & (pieces.lengths > 0)
        inside &= firsts + pieces.lengths <= len(self.corpus.tokens)
        if not inside.all() or filled > len(tokens):
            raise self._damaged_index()
        stored, end = self.corpus.tokens, 0
        for first, length in zip(firsts.tolist(), pieces.lengths.tolist(), strict=True):
            tokens[end : end + length] = stored[first : first + length]
            end += length
        self._check_ids(tokens[:filled])
        tokens[filled:] = self.corpus.manifest.tokenizer.end_of_document
        starts = np.concatenate([[0], ends if filled < len(tokens) else ends[:-1]])
        mask = self._loss_mask(pieces, filled)
        return Sample(tokens, starts, mask, self.corpus.prefix, filled)

    def describe_shortage(self, count: int) -> str:
        """Return an error message if the source has fewer than ``count`` samples, else ""."""
        available = self.blocks.blocks_in_one_epoch
        if self.repeat or count <= available:
            return ""
        return (
            f"source {self.corpus.prefix} is exhausted after {available} samples and "
            "data.on_exhausted is 'stop'; lower its weight, add data, or set it to 'repeat'"
        )

    def _damaged_index(self) -> UserError:
        return UserError(
            f"index {self.corpus.prefix}.idx is damaged: a sequence built from it has tokens that "
            "are not in the corpus; copy or prepare it again"
        )

    def _check_ids(self, tokens: np.ndarray) -> None:
        """Refuse ids outside the vocabulary, which could cause an error on the GPU."""
        ids = self.corpus.manifest.tokenizer.vocab_size
        smallest, largest = int(tokens.min()), int(tokens.max())
        if smallest < 0 or largest >= ids:
            raise UserError(
                f"{self.corpus.prefix}.bin holds token id {smallest if smallest < 0 else largest}, "
                f"but its tokenizer has ids 0 to {ids - 1}; the file is damaged, copy or prepare "
                "it again"
            )

    def _loss_mask(self, pieces: Pieces, filled: int) -> np.ndarray | None:
        loss_mask = np.arange(self.seq_length + 1) < filled
        if not self.corpus.manifest.is_fine_tuning:
            return None if loss_mask.all() else loss_mask
        parts = [
            self.corpus.loss_mask(document)[start : start + length]
            for document, start, length in zip(*pieces, strict=True)
        ]
        if sum(map(len, parts)) != filled:
            raise self._damaged_index()
        loss_mask[:filled] = np.concatenate(parts)
        return loss_mask


@dataclass(frozen=True)
class Samples:
    """All samples of a run, from all sources, indexed by the number of the sample in the run.

    ``sources`` maps the content hash of a corpus to its samples. A run can resume only with equal
    ``settings``.
    """

    config: DataConfig
    sources: dict[str, SourceSamples]
    history: MixtureHistory
    settings: dict[str, Any]

    def __getitem__(self, index: int) -> Sample:
        content, local = self.history.locate(index)
        source = self.sources.get(content)
        if source is None:
            raise UserError(
                f"sample {index} comes from source {self.history.path(content)}, which "
                "data.sources does not contain; add it again to replay the run from there"
            )
        if problem := source.describe_shortage(local + 1):
            raise UserError(problem)
        return source[local]

    def require(self, num_samples: int) -> None:
        """Raise a ``UserError`` if a source has too few samples for a run of ``num_samples``."""
        for content, count in self.history.counts(num_samples).items():
            source = self.sources.get(content)
            if source and (problem := source.describe_shortage(count)):
                raise UserError(f"{problem}; the run of {num_samples} samples needs {count}")

    def state(self, consumed_samples: int) -> dict[str, Any]:
        """Return the position in the data as JSON-serializable values, for :meth:`resumed`."""
        return {
            "consumed_samples": consumed_samples,
            "settings": self.settings,
            "mixture": self.history.to_json(),
            # Layouts of the corpora, such as text or chat. The export to Hugging Face needs them.
            "layouts": sorted(
                {str(s.corpus.manifest.settings["layout"]) for s in self.sources.values()}
            ),
        }

    def resumed(self, state: Mapping[str, Any]) -> "Samples":
        """Return the samples of a run that resumes from a saved :meth:`state`.

        Changed weights or sources apply from the saved ``consumed_samples`` on.
        """
        for name, value in self.settings.items():
            if state["settings"].get(name) != value:
                raise UserError(
                    f"the data position was saved with {name} {state['settings'].get(name)}, but "
                    f"the recipe has {value}, which is another order; keep it, or start a new run"
                )
        history = MixtureHistory.from_json(state["mixture"])
        history = history.changed(int(state["consumed_samples"]), self.history.periods[-1].sources)
        return replace(self, history=history)


def open_samples(config: DataConfig, seq_length: int, seed: int, split: Split) -> Samples:
    """Open the sources of a recipe, and return the samples of a split; build the caches if needed.

    ``seed`` affects only the training split, so all seeds are evaluated on the same samples.
    """
    if split != "train" and not getattr(config, f"{split}_fraction"):
        raise UserError(
            f"data.{split}_fraction is 0, which leaves no document for the {split} split; give a "
            "share above 0"
        )
    selection = _selection(config, seed, split)
    tokenizer = load_tokenizer(config.tokenizer)
    sources: dict[str, SourceSamples] = {}
    weights = []
    for source in config.sources:
        corpus = open_corpus(source.path)
        content = corpus.manifest.content
        if content in sources:
            raise UserError(
                f"sources {sources[content].corpus.prefix} and {source.path} hold the same tokens; "
                "list one of them, with the sum of both weights"
            )
        check_tokenizer(corpus, tokenizer)
        cache = Path(config.cache_dir or f"{corpus.prefix}.cache")
        order = open_order(corpus, selection, cache)
        blocks = open_blocks(corpus, order, seq_length, config.packing, selection, cache)
        key = derive_key("samples", content, split, selection.seed)
        repeat = config.on_exhausted == "repeat"
        sources[content] = SourceSamples(corpus, order, blocks, seq_length, key, repeat)
        weight = source.weight if order.tokens else 0.0
        if config.upsampling.mode == "global":
            # A source that keeps more of its tokens thus gets a larger share of the mixture.
            weight *= order.kept_share
        weights.append(SourceWeight(source.path, content, weight))
    if not any(weight.weight for weight in weights):
        raise UserError(
            f"no source with a weight has a document in the {split} split "
            f"(data.validation_fraction {config.validation_fraction:g}, data.test_fraction "
            f"{config.test_fraction:g}); give more documents or a larger fraction"
        )
    settings = {
        "seq_length": seq_length,
        "seed": selection.seed,
        "packing": config.packing,
        "long_tokens": selection.long_tokens,
        "keep_short": selection.keep_short,
        "validation_fraction": config.validation_fraction,
        "test_fraction": config.test_fraction,
        "split_seed": config.split_seed,
    }
    return Samples(config, sources, MixtureHistory([Period(0, tuple(weights))]), settings)


def _selection(config: DataConfig, seed: int, split: Split) -> Selection:
    upsampled = split == "train" and config.upsampling.mode != "none"
    return Selection(
        split,
        config.validation_fraction,
        config.test_fraction,
        config.split_seed,
        seed if split == "train" else config.split_seed,
        config.upsampling.long_tokens if upsampled else 0,
        config.upsampling.keep_short if upsampled else 1.0,
    )
