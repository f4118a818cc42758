"""Tests of a corpus that is prepared in parts and merged, compared with one ``prepare``."""

import base64
import gzip
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from diffmegatron.cli import app
from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.index import token_store
from diffmegatron.data.index.corpus_manifest import CorpusManifest
from diffmegatron.data.index.token_store import PartTokens, open_corpus
from diffmegatron.data.prepare import preparation
from diffmegatron.data.prepare.corpus_readers import CorpusFile, find_files, read_records
from diffmegatron.data.prepare.parts import Part, cut, merge
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.sampling.document_order import Split
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.errors import UserError


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of JSONL (plain, gzip and zstd), text and Parquet files.

    The JSONL files include broken lines, blank lines and an empty file.
    """
    folder = tmp_path_factory.mktemp("corpus") / "in"
    folder.mkdir()
    pick = np.random.default_rng(0)
    texts = [chr(33 + n % 90) * int(pick.integers(1, 60)) for n in range(700)]
    (folder / "a.jsonl").write_bytes(lines(texts[:350]) + b"\n\nbroken\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(texts[350:420])))
    (folder / "c.txt").write_text("one document\nof two lines")
    (folder / "d.jsonl").write_bytes(b"")
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[420:500]}), folder / "e.parquet")
    (folder / "f.jsonl.zst").write_bytes(zstandard.compress(lines(texts[500:560])))
    (folder / "g.jsonl").write_bytes(b"broken too\n" + lines(texts[560:]).rstrip(b"\n"))
    return folder


def run(inputs: Path, prefix: Path, part: str | None = None, **options: Any) -> CorpusManifest:
    chosen = None if part is None else Part.parse(part)
    options = {"tokenizer": "bytes", **options}
    return prepare([inputs], prefix, part=chosen, show_progress=False, **options)


def run_parts(inputs: Path, prefix: Path, number: int, **options: Any) -> CorpusManifest:
    for part in range(number, 0, -1):
        run(inputs, prefix, f"{part}/{number}", **options)
    return merge(prefix, show_progress=False)


@pytest.fixture(scope="module")
def whole(corpus: Path) -> tuple[Path, CorpusManifest]:
    prefix = corpus.parent / "whole"
    return prefix, run(corpus, prefix)


@pytest.fixture(scope="module")
def merged(corpus: Path) -> tuple[Path, CorpusManifest]:
    prefix = corpus.parent / "merged"
    return prefix, run_parts(corpus, prefix, 4)


def part_file(prefix: Path, number: int, of: int, suffix: str) -> Path:
    return Path(f"{prefix}.parts") / f"{number:05}-of-{of:05}{suffix}"


# A merged corpus equals the corpus of one ``prepare``


def test_merged_parts_equal_the_files_of_one_prepare(
    whole: tuple[Path, CorpusManifest], merged: tuple[Path, CorpusManifest]
) -> None:
    one, parts = (prefix for prefix, _ in (whole, merged))
    assert Path(f"{one}.idx").read_bytes() == Path(f"{parts}.idx").read_bytes()
    tokens = b"".join(part_file(parts, k, 4, ".bin").read_bytes() for k in range(1, 5))
    assert tokens == Path(f"{one}.bin").read_bytes()
    assert not Path(f"{parts}.bin").exists()
    excluded = {"inputs", "parts", "outputs", "checksum"}
    assert whole[1].model_dump(exclude=excluded) == merged[1].model_dump(exclude=excluded)
    assert whole[1].content == merged[1].content
    read: dict[str, bytes] = {}
    for record in merged[1].inputs:
        content = Path(record.path).read_bytes()
        content = content[record.before : len(content) - record.after]
        assert (record.bytes, record.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        read[record.path] = read.get(record.path, b"") + content
    assert len(merged[1].inputs) > len(read), "at least one file is cut between parts"
    assert read == {record.path: Path(record.path).read_bytes() for record in whole[1].inputs}


def opened(prefixes: list[Path], split: Split, **options: Any) -> Any:
    sources = [{"path": str(prefix), "weight": 2 - n} for n, prefix in enumerate(prefixes)]
    options = {"tokenizer": "bytes", "validation_fraction": 0.1, **options}
    return open_samples(DataConfig(sources=sources, **options), 64, 3, split)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_samples_of_merged_parts_equal_those_of_one_prepare(
    whole: tuple[Path, CorpusManifest],
    merged: tuple[Path, CorpusManifest],
    tmp_path: Path,
    split: Split,
    packing: str,
) -> None:
    (tmp_path / "other.jsonl").write_bytes(lines(["other " * n for n in range(1, 60)]))
    run(tmp_path / "other.jsonl", tmp_path / "other")
    expected, found = (
        opened([prefix, tmp_path / "other"], split, packing=packing)
        for prefix in (whole[0], merged[0])
    )
    # 600 samples are more than one pass over each source.
    for index in range(600):
        assert np.array_equal(found[index].tokens, expected[index].tokens)
        assert np.array_equal(found[index].starts, expected[index].starts)
    resumed = found.resumed(json.loads(json.dumps(expected.state(100))))
    assert len(resumed.history.periods) == 1, "the merged parts are the same corpus"


def test_merged_fine_tuning_parts_have_the_loss_masks_of_one_prepare(tmp_path: Path) -> None:
    pairs = [{"prompt": "ask" * (n % 5), "response": "answer" * (n % 3 + 1)} for n in range(50)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    one = run(tmp_path / "in.jsonl", tmp_path / "one", layout="instruction")
    parts = run_parts(tmp_path / "in.jsonl", tmp_path / "parts", 3, layout="instruction")
    assert (one.outputs[0].sha256, one.content) == (parts.outputs[0].sha256, parts.content)
    masks = [
        [corpus.loss_mask(document).tolist() for document in range(50)]
        for corpus in (open_corpus(str(tmp_path / name)) for name in ("one", "parts"))
    ]
    assert masks[0] == masks[1]


def test_empty_parts_can_be_merged_but_not_opened(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(["x" * 500, "", "y", "z"]))
    one = run(tmp_path / "in.jsonl", tmp_path / "one")
    parts = run_parts(tmp_path / "in.jsonl", tmp_path / "parts", 5)
    counts = [
        json.loads(part_file(tmp_path / "parts", k, 5, ".json").read_text())["documents"]
        for k in range(1, 6)
    ]
    assert sum(counts) == 3 and 0 in counts
    assert parts.content == one.content
    assert opened([tmp_path / "parts"], "train")[0] is not None
    empty = 1 + counts.index(0)
    run(tmp_path / "in.jsonl", tmp_path / "parts", f"{empty}/5")
    with pytest.raises(UserError, match="is a part without documents; give the merged"):
        open_corpus(str(part_file(tmp_path / "parts", empty, 5, "")))


def test_a_corpus_without_text_is_refused_by_the_merge(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"\n\n\n")
    with pytest.raises(UserError, match=r"2 parts in .* hold no document with text"):
        run_parts(tmp_path / "in.jsonl", tmp_path / "parts", 2)


def test_a_moved_corpus_opens_by_its_prefix_or_its_parts_folder(
    merged: tuple[Path, CorpusManifest], tmp_path: Path
) -> None:
    for suffix in (".idx", ".json"):
        shutil.copy(f"{merged[0]}{suffix}", tmp_path / f"here{suffix}")
    shutil.copytree(f"{merged[0]}.parts", tmp_path / "here.parts")
    expected = opened([merged[0]], "train")
    for name in ("here", "here.parts", "here.parts/"):
        found = opened([Path(f"{tmp_path}/{name}")], "train")
        assert np.array_equal(found[7].tokens, expected[7].tokens)
    config = DataConfig.model_validate({"sources": [{"path": "corpora/here.parts/"}]})
    assert config.sources[0].path == "corpora/here"


def test_duplicates_are_found_within_a_part_alone(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(["a", "a", "a", "a"]))
    assert run(tmp_path / "in.jsonl", tmp_path / "one", deduplicate=True).documents == 1
    parts = run_parts(tmp_path / "in.jsonl", tmp_path / "parts", 2, deduplicate=True)
    assert (parts.documents, parts.duplicates) == (2, 2)
    result = CliRunner().invoke(app, ["data", "merge", str(tmp_path / "parts")])
    assert "2 duplicates were dropped within parts, none across them" in result.output


# Division of the input into parts


@given(st.lists(st.lists(st.integers(0, 40), max_size=12), min_size=1, max_size=6), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_every_record_is_in_one_part_and_parts_are_equally_large(
    tmp_path: Path, contents: list[list[int]], data: st.DataObject
) -> None:
    number = data.draw(st.integers(1, 9))
    folder = tmp_path / "in"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    largest_piece = 1.0
    for place, sizes in enumerate(contents):
        can_be_cut = data.draw(st.booleans())
        text = "\n".join(f"{place}.{line}" + "x" * size for line, size in enumerate(sizes))
        (folder / f"{place}{'.jsonl' if can_be_cut else '.txt'}").write_text(text)
        piece = max(sizes, default=0) + 5 if can_be_cut else len(text) / 2
        largest_piece = max(largest_piece, piece)
    files = find_files([folder], "*")
    total = sum(file.size for file in files)
    parts = [cut(files, Part(k, number))[0] for k in range(1, number + 1)]
    assert [record for part in parts for record in payloads(part)] == payloads(files)
    assert sum(file.size for part in parts for file in part) == total
    for done in range(1, number):
        end = sum(file.size for part in parts[:done] for file in part)
        assert abs(end - total * done / number) <= largest_piece + 1


def payloads(files: list[CorpusFile]) -> list[bytes]:
    read = (record.payload for file in files for record in read_records(file, (), 1000))
    return [payload for payload in read if isinstance(payload, bytes)]


def test_a_reject_in_a_cut_file_counts_lines_from_a_recorded_byte(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(["x"] * 20) + b"broken\n" + lines(["y"] * 5))
    run(path, tmp_path / "out", "2/2", max_reject_share=0.5)
    rejected = part_file(tmp_path / "out", 2, 2, ".rejects.jsonl").read_text()
    reject = json.loads(rejected)
    rest = path.read_bytes()[reject["before"] :].splitlines()
    assert rest[reject["line"] - 1] == b"broken"
    with pytest.raises(UserError, match=r"in.jsonl line \d+ \(counted from byte \d+\): not JSON"):
        run(path, tmp_path / "other", "2/2", max_reject_share=0.01)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_tokens_of_files_read_as_one_array(
    tmp_path: Path, sizes: list[int], data: st.DataObject
) -> None:
    expected = np.arange(sum(sizes), dtype=np.int32)
    files, first = [], 0
    for number, size in enumerate(sizes):
        path = tmp_path / f"{number}.bin"
        expected[first : first + size].tofile(path)
        files.append((path, 4 * size))
        first += size
    tokens = PartTokens(files, np.dtype(np.int32))
    assert (len(tokens), tokens.itemsize) == (len(expected), 4)
    start, end = data.draw(st.integers(0, 45)), data.draw(st.integers(0, 45))
    assert tokens[start:end].tolist() == expected[start:end].tolist()


def test_few_files_are_open_at_once(
    merged: tuple[Path, CorpusManifest],
    whole: tuple[Path, CorpusManifest],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_store, "_MAPPED_AT_ONCE", 2)
    reference = open_corpus(str(whole[0]))
    corpus = open_corpus(str(merged[0]))
    for place in (*range(0, len(corpus.tokens), 50), 0):
        assert corpus.tokens[place : place + 1] == reference.tokens[place : place + 1]
    assert open_files(Path(f"{merged[0]}.parts")) == 2
    assert np.array_equal(corpus.tokens[0 : len(corpus.tokens)], reference.tokens[:])


def open_files(folder: Path) -> int:
    return sum(file.resolve().parent == folder for file in Path("/proc/self/fd").iterdir())


# Interrupted preparations and merges


def test_an_interrupted_part_is_resumed(
    corpus: Path,
    whole: tuple[Path, CorpusManifest],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(corpus, tmp_path / "out", "1/2")
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_index", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path / "out", "2/2")
    with pytest.raises(UserError, match=r"not complete: 2/2 is unfinished; .*--part 2"):
        merge(tmp_path / "out", show_progress=False)
    run(corpus, tmp_path / "out", "2/2")
    assert merge(tmp_path / "out", show_progress=False).content == whole[1].content


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_merge_can_be_repeated_and_detects_damaged_parts(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("diffmegatron.data.prepare.parts.write_durably", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_parts(corpus, prefix, 2)
    first = merge(prefix, show_progress=False)
    assert merge(prefix, show_progress=False) == first
    assert run(corpus, prefix, "1/2").part is not None, "a finished part is not prepared again"
    with pytest.raises(UserError, match=r"out.json was merged from 2 parts; .* choose"):
        run(corpus, prefix)
    content = part_file(prefix, 2, 2, ".bin").read_bytes()
    part_file(prefix, 2, 2, ".bin").write_bytes(content[:-1] + b"x")
    with pytest.raises(UserError, match=r"00002-of-00002.bin is damaged.*or delete .*out.json and"):
        merge(prefix, show_progress=False)
    result = CliRunner().invoke(app, ["data", "verify", str(prefix)])
    assert result.exit_code == 1 and "00002-of-00002.bin is damaged" in result.output
    part_file(prefix, 2, 2, ".bin").write_bytes(content[:-2])
    with pytest.raises(UserError, match=r"00002-of-00002.bin has \d+ bytes, but .*out.json has"):
        open_corpus(str(prefix))


# Parts and merges that are refused


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "1", "1/2/3", "-1/2", "1/100000", "a/b", ""])
def test_an_invalid_part_option_is_refused(text: str, tmp_path: Path) -> None:
    arguments = ["prepare", str(tmp_path), "--output", str(tmp_path / "out"), "--part", text]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith(f"--part {text} is not a part; give K/N")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "another"}, "00001-of-00002 was prepared with tokenizer 'bytes', and"),
        ({"text_field": "body"}, "00001-of-00002 was prepared with text_field 'text', and all"),
        ({"pattern": "*.jsonl"}, "was prepared from other input files .their names or sizes."),
        ({"part": "2/3"}, "out.parts contains parts K/2, and --part 2/3 is not one; give K/2"),
    ],
)
def test_a_part_with_other_settings_than_existing_parts_is_refused(
    corpus: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    run(corpus, tmp_path / "out", "1/2")
    if "tokenizer" in options:
        options = {"tokenizer": another_tokenizer(tmp_path)}
    with pytest.raises(UserError, match=message):
        run(corpus, tmp_path / "out", **{"part": "2/2", **options})
    assert len(list((tmp_path / "out.parts").glob("*.json"))) == 1


def copy_part(source: Path, target: Path) -> None:
    for suffix in (".bin", ".idx", ".json"):
        shutil.copy(f"{source}{suffix}", f"{target}{suffix}")


def others(corpus: Path, prefix: Path, **options: Any) -> None:
    """Prepare part 2 with ``options`` at another prefix, and move its files beside part 1."""
    run(corpus, prefix.with_name("other"), "2/2", **options)
    for path in prefix.with_name("other.parts").iterdir():
        path.rename(f"{prefix}.parts/{path.name}")


def another_tokenizer(folder: Path) -> str:
    ranks = [b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    (folder / "own.tiktoken").write_bytes(b"".join(ranks))
    return str(folder / "own.tiktoken")


def tokenizers(corpus: Path, prefix: Path) -> None:
    others(corpus, prefix, tokenizer=another_tokenizer(prefix.parent))


def another_file(corpus: Path, prefix: Path) -> None:
    shutil.copytree(corpus, prefix.with_name("more"))
    (prefix.with_name("more") / "z.txt").write_text("late")
    others(prefix.with_name("more"), prefix)


def changed_file(corpus: Path, prefix: Path) -> None:
    """Prepare both parts from one file that changes between the two preparations.

    The size of the file stays the same. But its lines begin at other bytes, so the file is cut at
    another byte.
    """
    shutil.rmtree(f"{prefix}.parts")
    path = prefix.with_name("in.jsonl")
    path.write_bytes(lines(["x"] * 20))
    run(path, prefix, "1/2")
    path.write_bytes(lines(["x" * 25] * 8)[: path.stat().st_size].ljust(path.stat().st_size))
    run(path, prefix, "2/2", max_reject_share=1)


def changed_to_its_end(corpus: Path, prefix: Path) -> None:
    """Prepare part 2 from a file of the same size, in whose second half no line begins."""
    changed_file(corpus, prefix)
    path, name = prefix.with_name("in.jsonl"), part_file(prefix, 2, 2, "")
    for file in name.parent.glob(f"{name.name}.*"):
        file.unlink()
    path.write_bytes(lines(["x" * (path.stat().st_size - 13)]))
    run(path, prefix, "2/2")


def damaged(corpus: Path, prefix: Path) -> None:
    run(corpus, prefix, "2/2")
    content = bytearray(part_file(prefix, 2, 2, ".bin").read_bytes())
    content[11] ^= 1
    part_file(prefix, 2, 2, ".bin").write_bytes(content)


def short(corpus: Path, prefix: Path) -> None:
    run(corpus, prefix, "2/2")
    with part_file(prefix, 2, 2, ".idx").open("r+b") as stream:
        stream.truncate(100)


def at_work(corpus: Path, prefix: Path) -> None:
    run(corpus, prefix, "2/2")
    part_file(prefix, 2, 2, ".partial").mkdir()


def whole_there(corpus: Path, prefix: Path) -> None:
    run(corpus, prefix, "2/2")
    run(corpus, prefix)


def two_numbers(corpus: Path, prefix: Path) -> None:
    copy_part(part_file(prefix, 1, 2, ""), part_file(prefix, 1, 3, ""))


def duplicate(corpus: Path, prefix: Path) -> None:
    copy_part(part_file(prefix, 1, 2, ""), part_file(prefix, 2, 2, ""))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda *_: None, "out.parts is not complete: 2/2 is missing; run .* --part 2/2 first"),
        (at_work, "out.parts is not complete: 2/2 is unfinished; run .* --part 2/2 first"),
        (duplicate, "00002-of-00002.json is the manifest of part 1/2, not of part 2/2; delete"),
        (two_numbers, "out.parts contains parts K/2 and parts K/3; delete the parts of one"),
        (
            tokenizers,
            "part 2/2 was prepared with tokenizer '.*own.tiktoken', unlike part 1/2; delete",
        ),
        (
            lambda *to: others(*to, max_document_bytes=99),
            "2/2 was .* with max_document_bytes",
        ),
        (another_file, "part 2/2 was prepared from other input files .* delete .*00002.. and"),
        (changed_file, r"in.jsonl was changed between the parts of .*out that read it"),
        (changed_to_its_end, r"in.jsonl was changed between the parts of .*out that read it"),
        (damaged, "00002-of-00002.bin is damaged: its sha256 is not that of .*--restart"),
        # The number of sequences depends on the size of pyarrow's file, so accept any number.
        (short, r"00002-of-00002.idx has 100 bytes, but \d+ sequences need"),
        (whole_there, "out.json was merged from other parts; delete it to merge these"),
    ],
)
def test_a_refused_merge_writes_nothing(
    corpus: Path, tmp_path: Path, make: Callable[[Path, Path], None], message: str
) -> None:
    prefix = tmp_path / "out"
    run(corpus, prefix, "1/2")
    make(corpus, prefix)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message):
        merge(prefix, show_progress=False)
    assert sorted(tmp_path.iterdir()) == before


def test_missing_and_unmerged_parts_are_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"out.parts holds no part; write parts with 'diffmegatron prepare .* 1/8"
    ):
        merge(tmp_path / "out")
    run(corpus, tmp_path / "out", "1/2")
    with pytest.raises(UserError, match=r"out.json does not exist; .* data merge .*out'"):
        opened([tmp_path / "out"], "train")
