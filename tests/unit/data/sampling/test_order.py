"""Tests of the sample order: permutations, mixtures, splits, up-sampling and packing."""

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffmegatron.data.sampling.document_order import (
    DocumentOrder,
    Selection,
    select_split,
)
from diffmegatron.data.sampling.length_upsampling import keep_long
from diffmegatron.data.sampling.mixture import Mixture, MixtureHistory, Period, SourceWeight
from diffmegatron.data.sampling.packing import best_fit, pack
from diffmegatron.data.sampling.permutation import derive_key, permute, random_bits, uniform
from diffmegatron.data.sampling.samples import SourceSamples
from diffmegatron.data.sampling.sequences import Blocks, Concatenated
from diffmegatron.errors import UserError

END = 1_000_000
document_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=40)
weights = (
    st.lists(st.floats(0, 100), min_size=1, max_size=8)
    .filter(lambda w: sum(w) > 1e-6)
    .map(lambda w: {f"source{number}": weight for number, weight in enumerate(w)})
)


# Permutations


@given(st.integers(1, 700), st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_of_neighbouring_keys_look_independent() -> None:
    size = 1000
    first, second = ([permute(i, size, key) for i in range(size)] for key in (1, 2))
    for ours, other in ((first, range(size)), (first, second)):
        assert sum(a == b for a, b in zip(ours, other, strict=True)) < 10
        assert abs(np.corrcoef(ours, other)[0, 1]) < 0.1
    neighbours = np.abs(np.diff(first))
    assert abs(neighbours.mean() - size / 3) < 30, "in a random permutation the mean is size / 3"


def test_uniform_is_splitmix64() -> None:
    """Compare ``random_bits`` with the published first outputs for seed 1234567 (Rosetta Code).

    Also check the range, mean and variance of ``uniform``.
    """
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert random_bits(1234567, np.arange(3)).tolist() == published
    sample = uniform(7, np.arange(100_000))
    assert sample.min() >= 0 and sample.max() < 1
    assert abs(sample.mean() - 0.5) < 0.005 and abs(sample.var() - 1 / 12) < 0.002


# Mixtures


@given(weights, st.integers(0, 500))
def test_mixture_numbers_each_sources_samples_in_turn(shares: dict[str, float], start: int) -> None:
    mixture = Mixture(shares)
    counts = mixture.counts(start)
    assert sum(counts.values()) == start
    for index in range(start, start + 100):
        source, local = mixture.locate(index)
        assert shares[source] > 0
        assert local == counts[source]
        counts[source] += 1
    assert mixture.counts(start + 100) == counts


@given(weights, st.integers(1, 10**12))
def test_mixture_shares_are_exact_to_a_sample_per_level(
    shares: dict[str, float], samples: int
) -> None:
    counts = Mixture(shares).counts(samples)
    for name, share in shares.items():
        wanted = samples * share / sum(shares.values())
        assert abs(counts[name] - wanted) <= 4 + samples * 1e-9


@pytest.mark.parametrize("shares", [[0.0, 0.0], [1.0, -0.5], []])
def test_invalid_mixture_weights_are_refused(shares: list[float]) -> None:
    with pytest.raises(UserError, match="must be at least 0 and not all zero"):
        MixtureHistory([_period(0, **{f"s{n}": share for n, share in enumerate(shares)})])


def _period(start: int, **shares: float) -> Period:
    return Period(start, tuple(SourceWeight(f"at/{n}", n, w) for n, w in shares.items()))


def test_history_continues_from_the_position_of_each_source() -> None:
    history = MixtureHistory([_period(0, a=1, b=1)])
    history = history.changed(101, _period(0, a=1, b=3, c=4).sources)
    history = history.changed(200, _period(0, c=1).sources)
    seen: Counter[str] = Counter()
    for index in range(300):
        content, local = history.locate(index)
        assert local == seen[content]
        seen[content] += 1
        assert +Counter(history.counts(index + 1)) == seen
    assert abs(seen["a"] - (50 + 99 / 8)) < 3 and abs(seen["c"] - (99 / 2 + 100)) < 3


def test_history_is_unchanged_before_the_change_and_replays() -> None:
    before = MixtureHistory([_period(0, a=2, b=1)])
    after = before.changed(50, _period(0, a=1, b=1).sources)
    assert [before.locate(i) for i in range(50)] == [after.locate(i) for i in range(50)]
    replayed = MixtureHistory.from_json(after.to_json())
    assert [after.locate(i) for i in range(99)] == [replayed.locate(i) for i in range(99)]


def test_history_ignores_units_and_order_of_sources() -> None:
    history = MixtureHistory([_period(0, a=2, b=1)])
    assert history.changed(10, _period(0, b=10, a=20).sources) is history
    swapped = MixtureHistory([_period(0, b=1, a=2)])
    assert [history.locate(i) for i in range(99)] == [swapped.locate(i) for i in range(99)]


def test_history_resumed_before_a_change_forgets_it() -> None:
    history = MixtureHistory([_period(0, a=1), _period(100, a=1, b=1)])
    assert [p.from_sample for p in history.changed(60, _period(0, b=1).sources).periods] == [0, 60]


def test_history_names_the_weights_it_refuses() -> None:
    with pytest.raises(UserError, match="at/a 1, at/b -2"):
        MixtureHistory([_period(0, a=1, b=-2)])


# Splits and up-sampling


def selection(split: str, **options: Any) -> Selection:
    values = {"validation_fraction": 0.1, "test_fraction": 0.05, "split_seed": 1, "seed": 2}
    return Selection(split, **{**values, **options})  # type: ignore[arg-type]


@given(st.integers(1, 300), st.floats(0, 0.5), st.floats(0, 0.4), st.integers(0, 9))
def test_splits_are_disjoint_and_complete(
    size: int, validation: float, test: float, seed: int
) -> None:
    options = {"validation_fraction": validation, "test_fraction": test, "split_seed": seed}
    parts = {
        split: select_split(size, selection(split, **options)).tolist()
        for split in ("train", "validation", "test")
    }
    assert sorted(itertools.chain(*parts.values())) == list(range(size))
    assert parts["train"], "the training split always has a document"
    if validation > 0 and size >= 2:
        assert len(parts["validation"]) == min(max(1, round(validation * size)), size - 1)
    if test > 0 and size >= 3 + round(validation * size):
        assert parts["test"]


def test_held_out_documents_depend_on_split_seed_and_not_on_seed() -> None:
    held_out = [
        select_split(1000, selection("validation", seed=seed, split_seed=split)).tolist()
        for seed, split in ((1, 1), (2, 1), (1, 2))
    ]
    assert held_out[0] == held_out[1] != held_out[2]


@given(st.floats(0.01, 0.99), st.integers(0, 99))
@settings(max_examples=20)
def test_upsampling_keeps_long_documents_and_a_share_of_short_ones(
    keep_short: float, seed: int
) -> None:
    lengths = np.random.default_rng(0).integers(2, 200, 20_000)
    documents = np.arange(len(lengths))
    kept = keep_long(lengths, documents, long_tokens=100, keep_short=keep_short, seed=seed)
    assert kept[lengths - 1 >= 100].all(), "the length excludes the end-of-document token"
    short = lengths - 1 < 100
    assert abs(kept[short].mean() - keep_short) < 5 * np.sqrt(0.25 / short.sum())


def test_the_length_threshold_excludes_the_end_of_document_token() -> None:
    lengths = np.array([99, 100, 101, 102])
    kept = keep_long(lengths, np.arange(4), long_tokens=100, keep_short=0.0, seed=1)
    assert kept.tolist() == [False, False, True, True], "the end-of-document token does not count"


def test_no_upsampling_keeps_everything() -> None:
    lengths = np.arange(1, 50)
    kept = keep_long(lengths, np.arange(49), long_tokens=10**6, keep_short=1.0, seed=1)
    assert kept.all()


# Packing


@given(document_lengths, st.integers(2, 50))
def test_packing_neither_loses_nor_doubles_a_token(lengths: list[int], capacity: int) -> None:
    documents = np.random.default_rng(0).permutation(len(lengths))
    sizes = np.array(lengths)
    for combine in (True, False):
        packed = pack(documents, sizes[documents], capacity, combine=combine)
        taken = [
            (document, position)
            for document, start, length in zip(
                packed["documents"], packed["starts"], packed["lengths"], strict=True
            )
            for position in range(start, start + length)
        ]
        every = [(n, position) for n, size in enumerate(lengths) for position in range(size)]
        assert sorted(taken) == every
        filled = np.add.reduceat(packed["lengths"], [0, *packed["ends"][:-1]])
        assert filled.max() <= capacity
        whole = sum(size <= capacity for size in lengths)
        uncut = np.sum(packed["lengths"] == sizes[packed["documents"]])
        assert uncut == whole, "only documents longer than a sequence are cut"


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(30, 64))
def test_best_fit_is_best_fit_decreasing(sizes: list[int], capacity: int) -> None:
    """Check that the free space of the bins equals that of the textbook algorithm's bins."""
    bins: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [(space, number) for number, space in enumerate(bins) if space >= size]
        if fitting:
            bins[min(fitting)[1]] -= size
        else:
            bins.append(capacity - size)
    places = best_fit(np.array(sizes), capacity)
    spaces = capacity - np.bincount(places, weights=sizes)
    assert sorted(spaces.tolist()) == sorted(bins)


def test_best_fit_fills_sequences_above_99_9_percent() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 50_000).astype(np.int64) + 1
    packed = pack(np.arange(len(lengths)), lengths, 2049, combine=True)
    assert lengths.sum() / (len(packed["ends"]) * 2049) > 0.999


# One source's samples


class _Corpus(SimpleNamespace):
    """Corpus in memory, without files, in which every token has a different id."""

    def __init__(self, lengths: list[int]) -> None:
        sizes = np.array(lengths, dtype=np.int32)
        ends = np.cumsum(sizes, dtype=np.int64)
        tokens = np.arange(ends[-1], dtype=np.int32)
        super().__init__(
            prefix="memory",
            lengths=sizes,
            offsets=(ends - sizes) * tokens.itemsize,
            tokens=tokens,
            manifest=SimpleNamespace(
                tokenizer=SimpleNamespace(end_of_document=END, vocab_size=len(tokens)),
                is_fine_tuning=False,
            ),
        )


def concatenated(
    lengths: list[int], seq_length: int, seed: int = 0, *, repeat: bool = True
) -> SourceSamples:
    corpus: Any = _Corpus(lengths)
    documents = np.random.default_rng(seed).permutation(len(lengths))
    ends = np.cumsum(corpus.lengths[documents], dtype=np.int64)
    order = DocumentOrder(documents, ends, (), (), selection("train"))
    blocks: Blocks = Concatenated(corpus, order, seq_length)
    key = derive_key(seed)
    return SourceSamples(corpus, order, blocks, seq_length, key, repeat)


@given(document_lengths, st.integers(1, 80), st.integers(0, 5))
def test_concatenation_uses_every_token_once_per_pass(
    lengths: list[int], seq_length: int, seed: int
) -> None:
    """Check that every token occurs equally often as input and as label.

    Let N be the number of tokens of the source, and s = ``seq_length`` the length of a sample. The
    test reads N samples. These have N * s inputs, which is exactly s passes over the source. Every
    token must therefore occur s times as input and s times as label.
    """
    source = concatenated(lengths, seq_length, seed)
    total = sum(lengths)
    samples = [source[index] for index in range(total)]
    inputs, labels = Counter[int](), Counter[int]()
    for sample in samples:
        assert sample.tokens.shape == (seq_length + 1,)
        inputs.update(sample.tokens[:-1].tolist())
        labels.update(sample.tokens[1:].tolist())
    assert inputs == labels == Counter(dict.fromkeys(range(total), seq_length))


@given(document_lengths, st.integers(1, 80), st.integers(0, 3))
def test_samples_are_blocks_of_the_stream_with_document_starts(
    lengths: list[int], seq_length: int, seed: int
) -> None:
    source = concatenated(lengths, seq_length, seed)
    firsts = source.corpus.offsets // 4
    stream = np.concatenate(
        [np.arange(firsts[n], firsts[n] + lengths[n]) for n in source.order.documents]
    )
    for index in range(20):
        sample = source[index]
        begin = source.block(index) * seq_length
        places = np.arange(begin, begin + seq_length + 1) % len(stream)
        assert sample.tokens.tolist() == stream[places].tolist()
        begins = set(np.flatnonzero(np.isin(sample.tokens, firsts)).tolist()) | {0}
        assert sample.starts.tolist() == sorted(begins)


@given(document_lengths, st.integers(1, 80))
def test_each_pass_is_a_permutation_of_its_own_blocks(lengths: list[int], seq_length: int) -> None:
    source = concatenated(lengths, seq_length)
    for epoch in range(4):
        chosen = range(source.blocks.first_block(epoch), source.blocks.first_block(epoch + 1))
        assert sorted(source.block(index) for index in chosen) == list(chosen)
        for index in chosen:
            assert source.blocks.epoch(index) == epoch


def test_passes_are_shuffled_differently() -> None:
    source = concatenated([64] * 100, 64)
    passes = [[source.block(epoch * 100 + i) % 100 for i in range(100)] for epoch in range(2)]
    assert passes[0] != passes[1] and sorted(passes[0]) == sorted(passes[1]) == list(range(100))


@given(document_lengths, st.integers(1, 80), st.integers(0, 3))
def test_a_non_repeating_source_uses_no_token_twice(
    lengths: list[int], seq_length: int, seed: int
) -> None:
    source = concatenated(lengths, seq_length, seed, repeat=False)
    whole = (sum(lengths) - 1) // seq_length
    assert source.blocks.blocks_in_one_epoch == whole
    inputs = [token for index in range(whole) for token in source[index].tokens[:-1].tolist()]
    labels = [token for index in range(whole) for token in source[index].tokens[1:].tolist()]
    assert len(set(inputs)) == len(inputs) == len(set(labels)) == whole * seq_length
