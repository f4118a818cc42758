"""Tests of ``open_samples`` and ``Loader`` on prepared files."""

import json
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.loader import Batch, Loader, collate
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.sampling import array_cache as cache
from diffmegatron.data.sampling import document_order as documents
from diffmegatron.data.sampling.samples import Sample, Samples, open_samples
from diffmegatron.errors import UserError


def make(folder: Path, name: str, sizes: list[int], **options: Any) -> str:
    """Prepare a corpus, and return its prefix.

    Document n repeats one letter ``sizes[n]`` times. Up to 90 documents have different letters.
    """
    path = folder / f"{name}.jsonl"
    first = ord(name[0]) * 7
    texts = [chr(33 + (first + number) % 90) * size for number, size in enumerate(sizes)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([path], folder / name, "bytes", show_progress=False, **options)
    return str(folder / name)


def config(*paths: str, **options: Any) -> DataConfig:
    sources = [{"path": path, "weight": number + 1} for number, path in enumerate(paths)]
    return DataConfig(**{"tokenizer": "bytes", "sources": sources, **options})


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("corpora")
    pick = np.random.default_rng(0)
    return (
        make(folder, "a", pick.integers(1, 300, 80).tolist()),
        make(folder, "b", pick.integers(1, 900, 50).tolist()),
    )


def loader(
    samples: Samples, rank: int = 0, ranks: int = 1, micro: int = 1, **options: Any
) -> Loader:
    return Loader(
        samples,
        micro_batch_size=micro,
        global_batch_size=12,
        data_parallel_rank=rank,
        data_parallel_size=ranks,
        **options,
    )


def rows(batches: list[Batch]) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch.tokens]


# The order


def test_sample_order_depends_only_on_seed_weights_and_files(
    corpora: tuple[str, str], tmp_path: Path
) -> None:
    def first(*paths: str, seed: int = 1, **options: Any) -> list[list[int]]:
        samples = open_samples(config(*paths, **options), 32, seed, "train")
        return [samples[index].tokens.tolist() for index in range(40)]

    moved = []
    for path in corpora:
        for file in Path(path).parent.glob(f"{Path(path).name}.*"):
            if file.is_file():
                shutil.copy(file, tmp_path)
        moved.append(str(tmp_path / Path(path).name))
    expected = first(*corpora)
    assert first(*moved, cache_dir=str(tmp_path / "cache")) == expected
    swapped = [{"path": corpora[1], "weight": 20}, {"path": corpora[0], "weight": 10}]
    assert first(sources=swapped) == expected
    assert first(*corpora, seed=2) != expected
    assert first(*corpora[::-1]) != expected, "in reverse order, the sources have other weights"


def test_mixture_gives_each_source_its_share(corpora: tuple[str, str]) -> None:
    samples = open_samples(config(*corpora), 32, 1, "train")
    realised = Counter(samples[index].source for index in range(300))
    assert realised == {corpora[0]: 100, corpora[1]: 200}


def documents_of(samples: Samples, count: int) -> set[tuple[str, int]]:
    """Return the (source, letter) pairs in the first ``count`` samples.

    In ``corpora``, a pair identifies a document, because each document of a source has another
    letter.
    """
    found = set()
    for index in range(count):
        sample = samples[index]
        found |= {(sample.source, token) for token in sample.tokens.tolist() if token != 256}
    return found


def test_splits_share_no_document(corpora: tuple[str, str]) -> None:
    recipe = config(*corpora, validation_fraction=0.1, test_fraction=0.1)
    parts = [
        documents_of(open_samples(recipe, 16, 1, split), 3000)
        for split in ("train", "validation", "test")
    ]
    assert [len(part) for part in parts] == [64 + 40, 8 + 5, 8 + 5]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]


def test_validation_is_the_same_for_every_seed(corpora: tuple[str, str]) -> None:
    first, second = (
        open_samples(config(*corpora, validation_fraction=0.1), 32, seed, "validation")
        for seed in (1, 2)
    )
    for index in range(20):
        assert first[index].tokens.tolist() == second[index].tokens.tolist()


def test_a_small_corpus_still_has_validation_documents(tmp_path: Path) -> None:
    path = make(tmp_path, "two", [5, 5])
    assert open_samples(config(path, validation_fraction=1e-9), 64, 1, "validation")[0] is not None
    single = make(tmp_path, "one", [5])
    assert open_samples(config(single, validation_fraction=0.5), 8, 1, "train")[0] is not None
    with pytest.raises(UserError, match="has a document in the validation split"):
        open_samples(config(single, validation_fraction=0.5), 8, 1, "validation")


# Ranks and resume


@given(
    st.sampled_from([(ranks, micro) for ranks in (1, 2, 3, 4, 6) for micro in (1, 2, 3)]),
    st.integers(0, 5),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_global_batches_do_not_depend_on_ranks_or_microbatches(
    corpora: tuple[str, str], layout: tuple[int, int], step: int
) -> None:
    ranks, micro = layout
    if 12 % (ranks * micro):
        return
    samples = open_samples(config(*corpora), 32, 1, "train")
    expected = [samples[index].tokens[:-1].tolist() for index in range(12 * step, 12 * step + 12)]
    by_rank = [
        [rows([batch]) for batch in loader(samples, rank, ranks, micro).read_step(12 * step)]
        for rank in range(ranks)
    ]
    microbatches = 12 // (ranks * micro)
    found = [row for m in range(microbatches) for rank in range(ranks) for row in by_rank[rank][m]]
    assert found == expected


@given(st.integers(0, 12), st.sampled_from([(1, 1), (2, 3), (4, 1), (6, 2)]))
@settings(max_examples=20)
def test_the_loader_resumes_at_any_step_on_other_ranks(
    corpora: tuple[str, str], boundary: int, layout: tuple[int, int]
) -> None:
    samples = open_samples(config(*corpora), 32, 1, "train")
    with loader(samples, micro=2) as first:
        for _ in range(boundary):
            next(first)
        state = json.loads(json.dumps(first.state()))
        expected = rows(next(first))
    ranks, micro = layout
    found: list[list[int]] = []
    parts = []
    for rank in range(ranks):
        with loader(
            samples.resumed(state), rank, ranks, micro, consumed_samples=state["consumed_samples"]
        ) as resumed:
            parts.append(next(resumed))
            assert resumed.consumed_samples == 12 * (boundary + 1)
    for microbatch in zip(*parts, strict=True):
        found += rows(list(microbatch))
    assert found == expected


def test_changed_weights_are_recorded_and_replayed(corpora: tuple[str, str]) -> None:
    first = open_samples(config(*corpora), 32, 1, "train")
    state = json.loads(json.dumps(first.state(60)))
    other = [{"path": corpora[0], "weight": 3}, {"path": corpora[1], "weight": 1}]
    changed = open_samples(config(sources=other), 32, 1, "train").resumed(state)
    assert [period.from_sample for period in changed.history.periods] == [0, 60]
    assert Counter(changed[i].source for i in range(60, 100)) == {corpora[0]: 30, corpora[1]: 10}
    replayed = open_samples(config(sources=other), 32, 1, "train")
    replayed = replayed.resumed({**changed.state(100), "consumed_samples": 0})
    for index in range(100):
        expected = (first if index < 60 else changed)[index]
        assert replayed[index].tokens.tolist() == expected.tokens.tolist()


def test_sources_can_be_added_and_removed_on_resume(corpora: tuple[str, str]) -> None:
    first = open_samples(config(corpora[0]), 32, 1, "train")
    both = open_samples(config(*corpora), 32, 1, "train").resumed(first.state(10))
    assert {both[i].source for i in range(10)} == {corpora[0]}
    assert {both[i].source for i in range(10, 20)} == set(corpora)
    gone = open_samples(config(corpora[1]), 32, 1, "train").resumed(both.state(20))
    assert gone[20].source == corpora[1]
    with pytest.raises(UserError, match=r"sample 0 comes from source .*/a, which"):
        gone[0]


@pytest.mark.parametrize(
    ("options", "seq_length", "seed", "message"),
    [
        ({}, 64, 1, "seq_length 32, but the recipe has 64"),
        ({}, 32, 2, "seed 1, but the recipe has 2"),
        ({"packing": "best_fit"}, 32, 1, "packing concatenate, but the recipe has best_fit"),
    ],
)
def test_resuming_with_another_sample_order_is_refused(
    corpora: tuple[str, str], options: dict[str, Any], seq_length: int, seed: int, message: str
) -> None:
    state = open_samples(config(*corpora), 32, 1, "train").state(12)
    with pytest.raises(UserError, match=message):
        open_samples(config(*corpora, **options), seq_length, seed, "train").resumed(state)


# The prefetch thread


def prefetch_threads() -> int:
    return sum(thread.name.startswith("data-prefetch") for thread in threading.enumerate())


def test_prefetch_ends_with_the_loader(corpora: tuple[str, str]) -> None:
    with loader(open_samples(config(*corpora), 32, 1, "train")) as running:
        expected = [rows(running.read_step(12 * step)) for step in range(5)]
        assert [rows(next(running)) for _ in range(5)] == expected
        assert prefetch_threads() == 1
    assert prefetch_threads() == 0


def test_an_error_in_the_prefetch_thread_is_raised_by_next(
    corpora: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = open_samples(config(*corpora), 32, 1, "train")
    with loader(samples) as running:
        next(running)
        monkeypatch.setattr(Samples, "__getitem__", lambda *_: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                for _ in range(5):
                    next(running)
    assert prefetch_threads() == 0


def test_a_batch_that_does_not_divide_is_refused(corpora: tuple[str, str]) -> None:
    with pytest.raises(UserError, match="global batch 12 is not a multiple of micro-batch 5"):
        loader(open_samples(config(*corpora), 32, 1, "train"), micro=5)


# Documents in a batch: positions, attention mask and loss mask


def sample(starts: list[int], learned: list[int] | None = None) -> Sample:
    mask = None if learned is None else np.array(learned, dtype=bool)
    return Sample(np.arange(7, dtype=np.int64), np.array(starts), mask, "memory", 7)


def test_plain_batches_ignore_document_boundaries() -> None:
    batch = collate([sample([0, 3]), sample([0])], config("x"))
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5, 6]] * 2
    assert batch.loss_mask.tolist() == [[1.0] * 6] * 2
    assert batch.cu_seqlens is None
    dtypes = (batch.tokens.dtype, batch.labels.dtype)
    assert dtypes == (torch.int64,) * 2 and batch.loss_mask.dtype == torch.float32


@pytest.mark.parametrize("eod_mask_loss", [False, True])
def test_attention_and_loss_stop_at_documents(eod_mask_loss: bool) -> None:
    recipe = config("x", reset_attention_mask=True, eod_mask_loss=eod_mask_loss)
    batch = collate([sample([0, 2, 3]), sample([0, 6])], recipe)
    assert batch.loss_mask.tolist() == [[1, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0]]
    # The second row's second document begins at a label, so it has no input.
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6, 12]
    assert batch.cu_seqlens.dtype == torch.int32


def test_unlearned_labels_are_masked() -> None:
    batch = collate([sample([0], [0, 0, 1, 1, 0, 0, 1])], config("x"))
    assert batch.loss_mask.tolist() == [[0, 1, 1, 0, 0, 1]]


def test_best_fit_pads_with_masked_ends(tmp_path: Path) -> None:
    path = make(tmp_path, "a", [20, 9, 14, 40])
    recipe = config(path, packing="best_fit", validation_fraction=0, reset_attention_mask=True)
    samples = open_samples(recipe, 32, 1, "train")
    seen: Counter[int] = Counter()
    for index in range(3):
        one = samples[index]
        counted = one.loss_mask if one.loss_mask is not None else np.ones(33, dtype=bool)
        assert (one.tokens[~counted] == 256).all()
        seen.update(one.tokens[counted].tolist())
        # The first token of a document behind another one has no loss.
        first = np.isin(np.arange(33), one.starts)
        assert collate([one], recipe).loss_mask.sum() == (counted & ~first)[1:].sum()
    assert sum(seen.values()) == 21 + 10 + 15 + 41
    assert seen[256] == 4, "each of the 4 documents has one end-of-document token"
    again = Counter(token for index in range(3, 6) for token in samples[index].tokens.tolist())
    again[256] = 4  # the end tokens that pad a sample are not counted
    assert again == seen, "the second pass has the same document tokens"


def test_packing_off_puts_one_document_in_a_sample(tmp_path: Path) -> None:
    path = make(tmp_path, "a", [20, 9, 40])
    samples = open_samples(config(path, packing="none", validation_fraction=0), 32, 1, "train")
    found = [set(samples[index].tokens.tolist()) - {256} for index in range(4)]
    assert sorted(map(len, found)) == [1] * 4, "the longest document is cut in two"
    assert len(set.union(*found)) == 3


def test_packing_off_pads_every_document_to_a_longer_sequence(tmp_path: Path) -> None:
    path = make(tmp_path, "a", [20, 9, 40])
    recipe = config(path, packing="none", validation_fraction=0)
    samples = open_samples(recipe, 41, 1, "train")
    assert samples.sources[samples.history.locate(0)[0]].blocks.blocks_in_one_epoch == 3
    labels = [int(collate([samples[index]], recipe).loss_mask.sum()) for index in range(3)]
    assert sorted(labels) == [9, 20, 40], "the first token of a sample is not a label"


def test_the_rest_of_a_cut_response_is_not_predicted_from_another_chat(tmp_path: Path) -> None:
    lengths = {"x": 40, "y": 42}
    lines = [json.dumps({"prompt": "?", "response": letter * n}) for letter, n in lengths.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    prepare(
        [tmp_path / "in.jsonl"], tmp_path / "sft", "bytes", layout="instruction",
        show_progress=False,
    )  # fmt: skip
    recipe = config(
        str(tmp_path / "sft"), packing="best_fit", validation_fraction=0, reset_attention_mask=True
    )
    samples = open_samples(recipe, 31, 1, "train")
    batch = collate([samples[index] for index in range(3)], recipe)
    learned = Counter(batch.labels[batch.loss_mask.bool()].tolist())
    assert learned[256] == 2
    # Each response is cut once, and both rests share a sequence. The first token of the one is no
    # label of this sequence, and that of the other has no context.
    assert learned[ord("x")] == 39 and learned[ord("y")] == 41


def test_only_responses_are_learned(tmp_path: Path) -> None:
    pairs = [("ask", "answer"), ("longer question", "no"), ("", "just said")]
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs)
    )
    prepare(
        [tmp_path / "in.jsonl"], tmp_path / "sft", "bytes", layout="instruction",
        show_progress=False,
    )  # fmt: skip
    recipe = config(str(tmp_path / "sft"), packing="best_fit", validation_fraction=0)
    learned = []
    samples = open_samples(recipe, 64, 1, "train")
    batch = collate([samples[0]], recipe)
    for label, counted in zip(batch.labels[0].tolist(), batch.loss_mask[0].tolist(), strict=True):
        learned.append(chr(label) if label < 256 and counted else "|" if counted else "")
    assert sorted("".join(learned).strip("|").split("|")) == ["answer", "just said", "no"]
    assert "".join(learned).count("|") == 3, "each response end has a loss, padding none"


# Up-sampling


def test_upsampling_leaves_the_shares_of_sources_unless_global(tmp_path: Path) -> None:
    short = make(tmp_path, "short", [9] * 400 + [99] * 10)
    long = make(tmp_path, "long", [9] * 100 + [99] * 40)

    def share(mode: str) -> float:
        recipe = config(short, long, upsampling={"mode": mode, "long_tokens": 50})
        samples = open_samples(recipe, 16, 1, "train")
        return sum(samples[index].source == long for index in range(1000)) / 1000

    assert share("none") == share("per_source") == pytest.approx(2 / 3, abs=2e-3)
    # With its end-of-document token, a document of 9 or 99 bytes has 10 or 100 tokens, so each
    # source has 5000 tokens. Up-sampling keeps all documents of at least 50 tokens, and a tenth of
    # the shorter documents (the default of ``keep_short``). The source ``short`` keeps about
    # 40 x 10 + 10 x 100 = 1400 tokens, and ``long`` keeps about 10 x 10 + 40 x 100 = 4100 tokens.
    # The share of a source is proportional to its weight times its kept tokens. The weight of
    # ``short`` is 1, and the weight of ``long`` is 2.
    expected = 2 * 4100 / (2 * 4100 + 1400)
    assert share("global") == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("packing", ["concatenate", "best_fit", "none"])
def test_a_source_without_validation_documents_is_skipped(tmp_path: Path, packing: str) -> None:
    one, ten = make(tmp_path, "one", [200]), make(tmp_path, "ten", [200] * 10)
    recipe = config(one, ten, validation_fraction=0.2, packing=packing)
    for _ in range(2):  # The second time, best_fit and none read their tables from the cache.
        samples = open_samples(recipe, 32, 1, "validation")
        assert {samples[n].source for n in range(20)} == {ten}


def test_upsampling_thins_short_documents_in_training_only(tmp_path: Path) -> None:
    path = make(tmp_path, "mixed", [9] * 400 + [99] * 20)
    recipe = config(
        path, upsampling={"mode": "per_source", "long_tokens": 99}, validation_fraction=0.1
    )
    train = open_samples(recipe, 16, 1, "train").sources.popitem()[1].order
    held_out = open_samples(recipe, 16, 1, "validation").sources.popitem()[1].order
    before, after = (
        {part.at_least: part.documents for part in bins if part.documents}
        for bins in (train.split_lengths, train.lengths)
    )
    assert before[64] == after[64] and 0.02 < after[8] / before[8] < 0.2
    assert held_out.lengths == held_out.split_lengths
    assert train.tokens == after[8] * 10 + after[64] * 100


def test_upsampling_that_keeps_nothing_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path, "short", [5] * 9)
    upsampling = {"mode": "per_source", "long_tokens": 50, "keep_short": 0.0}
    with pytest.raises(UserError, match=r"keeps no document of source .*short: all are shorter"):
        open_samples(config(path, upsampling=upsampling), 16, 1, "train")


# The index cache


def test_the_index_is_built_once(
    corpora: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = config(*corpora, cache_dir=str(tmp_path), packing="best_fit")
    first = open_samples(recipe, 32, 1, "train")
    monkeypatch.setattr(cache, "_write", lambda *_: pytest.fail("built again"))
    second = open_samples(recipe, 32, 1, "train")
    assert first[7].tokens.tolist() == second[7].tokens.tolist()


def test_concurrent_openers_build_the_index_once(
    corpora: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    original = documents.build_order

    def slow(*arguments: Any) -> Any:
        built.append(1)
        time.sleep(0.2)
        return original(*arguments)

    monkeypatch.setattr(documents, "build_order", slow)
    recipe = config(corpora[0], cache_dir=str(tmp_path))
    threads = [
        threading.Thread(target=open_samples, args=(recipe, 32, 1, "train")) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1
    assert not list(tmp_path.glob("*.tmp"))


def test_an_unwritable_index_cache_is_refused(corpora: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write in the index cache .* set data\.cache_dir"):
        open_samples(config(corpora[0], cache_dir=str(tmp_path / "file")), 32, 1, "train")


# Bad input


def damaged(corpora: tuple[str, str], tmp_path: Path) -> str:
    for file in Path(corpora[0]).parent.glob("a.*"):
        if file.is_file():
            shutil.copy(file, tmp_path)
    return str(tmp_path / "a")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


BAD_FILES = [
    ("bin", Path.unlink, r"cannot read .*a\.bin: No such file"),
    ("idx", Path.unlink, r"cannot read .*a\.idx"),
    ("json", Path.unlink, r"a\.json does not exist; write it with 'diffmegatron prepare"),
    ("bin", cut, r"a\.bin has \d+ bytes, but .*a\.json has \d+ tokens"),
    ("idx", cut, r"index .*a\.idx has \d+ bytes, but 80 sequences need"),
    ("json", cut, r"a\.json is damaged and cannot be used"),
    ("idx", lambda path: path.write_bytes(b"no"), r"a\.idx is not an index of Megatron \("),
    ("idx", lambda path: overwrite(path, 34 + 4 * 79, b"\xff\xff\0\0"), r"ends at byte \d+ of"),
    ("idx", lambda path: overwrite(path, 34 + 12 * 80, b"\1"), "at boundary 0 of its documents"),
    ("idx", lambda path: overwrite(path, 34 + 12 * 80 + 8 * 9, b"\7"), "at boundary 9 of its doc"),
    ("idx", lambda path: overwrite(path, 34 + 20 * 80, b"\7"), "end with sequence 7 of 80"),
    ("idx", lambda path: overwrite(path, 9, b"\2"), r"is not an index of Megatron \(version 1"),
    ("idx", lambda path: overwrite(path, 18, b"\xff" * 8), "has 1642 bytes, but 1844674"),
    ("idx", lambda path: overwrite(path, 26, b"\0" * 8), "80 sequences for -1 documents"),
    ("idx", lambda path: overwrite(path, 34 + 4 * 5, b"\xff\xff\0\0"), "damaged at document 6: "),
    ("idx", lambda path: overwrite(path, 34 + 4 * 5, b"\xff" * 4), "damaged at document 5: "),
    ("idx", lambda path: overwrite(path, 34 + 4 * 80 + 8 * 9, b"\xff" * 7), "at document 9: "),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "damage", "message"), BAD_FILES)
def test_damaged_files_are_refused(
    corpora: tuple[str, str], tmp_path: Path, suffix: str, damage: Any, message: str
) -> None:
    prefix = damaged(corpora, tmp_path)
    damage(Path(f"{prefix}.{suffix}"))
    with pytest.raises(UserError, match=message) as raised:
        open_samples(config(prefix), 32, 1, "train")
    assert "\n" not in str(raised.value)


def test_an_index_of_another_corpus_is_refused(corpora: tuple[str, str], tmp_path: Path) -> None:
    prefix = damaged(corpora, tmp_path)
    shutil.copy(f"{corpora[1]}.idx", f"{prefix}.idx")
    with pytest.raises(UserError, match=r"has 50 documents, but .*a\.json has 80"):
        open_samples(config(prefix), 32, 1, "train")


def test_another_tokenizer_is_refused(
    corpora: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = damaged(corpora, tmp_path)
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    manifest["tokenizer"]["sha256"] = "0" * 64
    del manifest["checksum"]
    Path(f"{prefix}.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"prepared with tokenizer 'bytes' .sha256 000000000000"):
        open_samples(config(prefix), 32, 1, "train")


def test_one_corpus_listed_twice_is_refused(corpora: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="hold the same tokens"):
        open_samples(config(corpora[0], damaged(corpora, tmp_path)), 32, 1, "train")


@pytest.mark.parametrize("shares", [(-1.0, 2.0), (0.0, 0.0)])
def test_weights_are_checked_in_the_recipe(shares: tuple[float, float]) -> None:
    sources = [{"path": str(number), "weight": share} for number, share in enumerate(shares)]
    with pytest.raises(ValidationError, match=r"greater than or equal to 0|must be above zero"):
        config(sources=sources)


def test_an_exhausted_source_is_detected_before_training(tmp_path: Path) -> None:
    path = make(tmp_path, "a", [31] * 10)
    recipe = config(path, on_exhausted="stop", validation_fraction=0)
    samples = open_samples(recipe, 32, 1, "train")
    samples.require(9)
    assert samples[8] is not None
    with pytest.raises(UserError, match=r"exhausted after 9 samples .* needs 10"):
        samples.require(10)
    with pytest.raises(UserError, match="exhausted after 9 samples"):
        samples[9]
    repeating = open_samples(config(path, validation_fraction=0), 32, 1, "train")
    repeating.require(10**12)
