"""Truncated or changed inputs and damaged outputs cause an error of one sentence."""

import gzip
import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from typer.testing import CliRunner

from diffmegatron.cli import app
from diffmegatron.data.index.corpus_manifest import (
    CorpusManifest,
    check_hashes,
    check_sizes,
    hash_file,
    read_corpus_manifest,
)
from diffmegatron.data.prepare import corpus_readers as corpus
from diffmegatron.data.prepare import preparation
from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import printable

# Only the manifest's checksum detects damage to these manifest keys. The checks of the output files
# do not detect it.
MANIFEST_KEYS = ["vocab_size", "settings", "text_bytes", "rejected", "lengths", "inputs"]
TEXTS = [f"document {number} " * 20 for number in range(3000)]


def run(inputs: Path | list[Path], prefix: Path, **options: Any) -> CorpusManifest:
    paths = inputs if isinstance(inputs, list) else [inputs]
    return prepare(paths, prefix, "bytes", show_progress=False, **options)


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(jsonl(TEXTS[:50]))
    return path


def flip(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_folder(path: Path) -> None:
    path.unlink()
    (path / "within").mkdir(parents=True)


# Inputs


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def _parquet(path: Path) -> bytes:
    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=500)
    return path.read_bytes()


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


BROKEN = [
    ("jsonl.gz", lambda content: half(gzip.compress(content)), "end-of-stream marker"),
    ("jsonl.gz", lambda content: gzip.compress(content) + b"more", "Not a gzipped file"),
    ("jsonl.gz", lambda content: gzip.compress(content)[:-6] + b"\0" * 6, "CRC check failed"),
    ("jsonl.gz", lambda content: b"", "archive is empty"),
    ("jsonl.gz", lambda content: content, "Not a gzipped file"),
    ("txt.gz", lambda content: half(gzip.compress(content)), "end-of-stream marker"),
    ("jsonl.zst", lambda content: half(zstd(content)), "ends within a frame"),
    ("jsonl.zst", lambda content: zstd(content) + half(zstd(content)), "ends within a frame"),
    ("jsonl.zst", lambda content: zstd(content)[:-1], "ends within a frame"),
    ("jsonl.zst", lambda content: zstd(content) + b"more", "nknown frame|ends within"),
    ("jsonl.zst", lambda content: b"", "archive is empty"),
    ("txt.zst", lambda content: half(zstd(content)), "ends within a frame"),
    ("parquet", lambda content: b"PAR1 not really", "Parquet magic bytes"),
    ("parquet", lambda content: b"", "Parquet file size is 0"),
]


@pytest.mark.parametrize(("suffix", "damage", "said"), BROKEN)
def test_a_damaged_input_file_refuses_the_corpus(
    tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes], said: str
) -> None:
    cut, after = tmp_path / f"a.{suffix}", tmp_path / "b.jsonl"
    cut.write_bytes(damage(jsonl(TEXTS)))
    after.write_bytes(jsonl(TEXTS[:3]))
    with pytest.raises(UserError, match=said) as caught:
        run([cut, after], tmp_path / "out", max_reject_share=1.0)
    assert re.search(rf"{cut} cannot be read beyond document \d+: .*--restart", str(caught.value))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("out.[bijl]*"))
    with pytest.raises(UserError, match=said):
        run([cut, after], tmp_path / "out", max_reject_share=1.0)
    run([after], tmp_path / "out", restart=True)
    assert read_corpus_manifest(tmp_path / "out").documents == 3


def test_a_truncated_input_file_refuses_the_corpus_with_workers(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(half(gzip.compress(jsonl(TEXTS))))
    with pytest.raises(UserError, match=r"in\.jsonl\.gz cannot be read beyond document \d+: "):
        run(tmp_path / "in.jsonl.gz", tmp_path / "out", workers=2)


def test_a_row_group_that_is_damaged_refuses_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    content = bytearray(_parquet(path))
    content[len(content) // 2 : len(content) // 2 + 400] = b"\0" * 400
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"in\.parquet cannot be read beyond document \d+: "):
        run(path, tmp_path / "out", max_reject_share=1.0)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_a_page_with_another_checksum_refuses_the_corpus(tmp_path: Path, compression: str) -> None:
    """Check that a flipped bit never changes the text read from a file with page checksums."""
    path, draw = tmp_path / "in.parquet", random.Random(0)
    table = pyarrow.table({"text": [*TEXTS, *(draw.randbytes(40).hex() for _ in range(200))]})
    pyarrow.parquet.write_table(table, path, compression=compression, write_page_checksum=True)
    content = path.read_bytes()
    # The footer has no checksum, so no bit of it is flipped. Its length is stored in the four bytes
    # before the last magic bytes.
    end = len(content) - 8 - int.from_bytes(content[-8:-4], "little")

    def texts() -> list[object]:
        (file,) = find_files([path], "*")
        return [record.payload["text"] for record in read_records(file, ("text",), 1 << 20)]

    whole, refused = texts(), 0
    for _ in range(60):
        place = draw.randrange(4, end)
        flipped = content[place] ^ (1 << draw.randrange(8))
        path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
        try:
            assert texts() == whole
        except UserError as error:
            assert "cannot be read beyond document" in str(error)
            refused += 1
    assert refused > 50, "only flipped bits in unused fields of a page header are harmless"


def test_a_row_with_invalid_utf_8_is_one_reject(tmp_path: Path) -> None:
    messages = [[{"role": "assistant", "content": text}] for text in ("good", "bad", "fine")]
    table = pyarrow.table({"messages": messages})
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"bad", b"\xff\xff\xff"))
    manifest = run(path, tmp_path / "out", layout="chat", max_reject_share=0.5)
    assert (manifest.documents, manifest.rejected) == (2, 1)
    reject = json.loads((tmp_path / "out.rejects.jsonl").read_text())
    assert reject["line"] == 2 and "a value cannot be read" in reject["reason"]


def grow(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(jsonl(["late"]))


def rewrite(path: Path) -> None:
    content, status = path.read_bytes(), path.stat()
    path.write_bytes(content.swapcase())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def replace(path: Path) -> None:
    """Replace a file by another file of the same size and modification time."""
    other, status = path.with_name("other"), path.stat()
    other.write_bytes(path.read_bytes().swapcase())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


CHANGES = [
    (grow, "was changed"),
    (rewrite, "was changed"),
    (replace, "was changed"),
    (lambda path: os.truncate(path, 10), "was changed"),
    (Path.unlink, "was removed|No such file"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
@pytest.mark.parametrize("moment", ["before it is opened", "while it is read", "before its hash"])
def test_a_file_changed_while_it_is_read_refuses_the_corpus(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
    said: str,
    moment: str,
) -> None:
    def once(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any) -> Any:
            if source.exists() and hash_file(source) == before:
                change(source)
            return function(*arguments)

        return wrapper

    before = hash_file(source)
    patched = {
        "before it is opened": (corpus, "_open"),
        "while it is read": (corpus, "CorpusRecord"),
        "before its hash": (preparation, "length_histogram"),
    }[moment]
    monkeypatch.setattr(*patched, once(getattr(*patched)))
    with pytest.raises(UserError, match=said) as caught:
        run(source, tmp_path / "out")
    assert str(source) in str(caught.value)
    assert not list(tmp_path.glob("out.[bij]*"))


def test_a_folder_is_read_whole_or_not_at_all(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("text")
    (folder / "sub" / "b.txt").write_text("text")
    assert [file.path.name for file in find_files([folder], "*.txt")] == ["a.txt", "b.txt"]
    (folder / "dangling.txt").symlink_to("nothing")
    with pytest.raises(UserError, match=r"cannot read .*dangling\.txt: No such file"):
        find_files([folder], "*.txt")
    (folder / "dangling.txt").unlink()
    os.mkfifo(folder / "fifo")
    with pytest.raises(UserError, match="fifo is a FIFO, not a file"):
        find_files([folder], "*")
    with pytest.raises(UserError, match="fifo is a FIFO, not a file"):
        find_files([folder / "fifo"], "*")
    listed = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(UserError, match=r"cannot read corpus folder .*sub: Permission denied"):
        find_files([folder], "*.txt")


@pytest.mark.parametrize(
    ("name", "pattern", "said"),
    [("n" * 5_000, "*", "does not exist"), (".", "", "--pattern is empty")],
)
def test_missing_names_and_empty_patterns_are_refused(
    tmp_path: Path, name: str, pattern: str, said: str
) -> None:
    with pytest.raises(UserError, match=said) as caught:
        find_files([tmp_path / name], pattern)
    assert len(str(caught.value)) < 400


def test_file_names_that_are_not_utf_8_are_printed_unambiguously(tmp_path: Path) -> None:
    names = [
        b"in \xff.jsonl",
        rb"in \xff.jsonl",
        "数学.jsonl".encode(),
        rb"a\\.jsonl",
        b"new\nline",
    ]
    texts = [printable(os.fsdecode(name)) for name in names]
    assert texts == [r"in \xff.jsonl", r"in \\xff.jsonl", "数学.jsonl", r"a\\\\.jsonl", "new\nline"]
    undone = [re.sub(rb"\\(\\|x..)", _byte, text.encode()) for text in texts]
    assert undone == names
    folder = tmp_path / os.fsdecode(b"in\xfe")
    folder.mkdir()
    for number, name in enumerate(names[:2]):
        (folder / os.fsdecode(name)).write_bytes(jsonl([f"text {number}"]) + b"damaged\n")
    prefix = tmp_path / os.fsdecode(b"out\xff")
    for _ in "ab":
        manifest = run(folder, prefix, max_reject_share=0.5, commit_seconds=0)
        assert [Path(file.path).name for file in manifest.inputs] == texts[1::-1]
    assert json.loads(Path(f"{prefix}.rejects.jsonl").read_text().splitlines()[0])["file"].endswith(
        manifest.inputs[0].path
    )


def _byte(match: re.Match[bytes]) -> bytes:
    found = match.group(1)
    return found if found == b"\\" else bytes([int(found[1:], 16)])


# Outputs


DAMAGED_OUTPUT = [
    (".bin", flip, r"out\.bin is damaged: its sha256 is not that of .*out\.json"),
    (".bin", lambda path: os.truncate(path, 10), r"out\.bin has 10 bytes"),
    (".bin", lambda path: path.write_bytes(b"\0" * path.stat().st_size), "its sha256 is not"),
    (".bin", Path.unlink, r"cannot read .*out\.bin: No such file"),
    (".bin", become_fifo, r"out\.bin is a FIFO"),
    (".bin", become_folder, r"out\.bin is a folder"),
    (".idx", lambda path: flip(path, 300), r"out\.idx is damaged: its sha256"),
    (".idx", lambda path: path.write_bytes(b""), "is not an index of Megatron "),
    (".idx", become_fifo, r"out\.idx is a FIFO"),
    (".json", lambda path: path.write_bytes(b"[" * 100_000), r"out\.json is damaged"),
    (".json", lambda path: path.write_bytes(b""), r"out\.json is damaged"),
    (".json", become_fifo, r"out\.json is a FIFO"),
]


@pytest.mark.parametrize(("suffix", "damage", "said"), DAMAGED_OUTPUT)
def test_damaged_output_is_refused_and_restart_prepares_it_again(
    source: Path, tmp_path: Path, suffix: str, damage: Callable[[Path], None], said: str
) -> None:
    prefix = tmp_path / "out"
    run(source, prefix)
    good = {end: Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx", ".json")}
    damage(Path(f"{prefix}{suffix}"))
    with pytest.raises(UserError, match=said) as caught:
        run(source, prefix)
    assert str(caught.value).endswith("(--restart prepares it again)")
    verified = CliRunner().invoke(app, ["data", "verify", str(prefix)])
    assert verified.exit_code == 1
    assert re.search(f"out: damaged: .*{said}", verified.output.replace("\n", ""))
    path = Path(f"{prefix}{suffix}")
    if path.is_dir():
        shutil.rmtree(path)
    run(source, prefix, restart=True)
    assert {end: Path(f"{prefix}{end}").read_bytes() for end in good} == good


def test_verify_reports_good_and_damaged_output(source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    first = CliRunner().invoke(app, ["data", "verify", str(tmp_path / "out")])
    assert first.exit_code == 0
    assert "out: good, 50 documents, " in first.output.replace("\n", "")
    flip(tmp_path / "out.bin")
    both = [str(tmp_path / "out"), str(tmp_path / "missing")]
    assert CliRunner().invoke(app, ["data", "verify", "--sizes", both[0]]).exit_code == 0
    wrong = CliRunner().invoke(app, ["data", "verify", *both])
    assert wrong.exit_code == 1 and wrong.output.count(": damaged: ") == 2


def test_files_may_be_copied_to_another_prefix(source: Path, tmp_path: Path) -> None:
    manifest = run(source, tmp_path / "out")
    for end in (".bin", ".idx", ".json"):
        shutil.copy(tmp_path / f"out{end}", tmp_path / f"other{end}")
    assert check_hashes(tmp_path / "other") == manifest


@pytest.mark.parametrize("restart", [False, True])
def test_good_output_of_other_inputs_is_never_dropped(
    source: Path, tmp_path: Path, restart: bool
) -> None:
    run(source, tmp_path / "out")
    before = hash_file(tmp_path / "out.bin")
    source.write_bytes(jsonl(["other"]))
    with pytest.raises(UserError, match="was prepared with "):
        run(source, tmp_path / "out", restart=restart)
    assert hash_file(tmp_path / "out.bin") == before


def test_a_manifest_with_wrong_values_is_refused(source: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out"
    run(source, prefix)
    good = json.loads(Path(f"{prefix}.json").read_text())
    for changes in (
        {"documents": 0},
        {"documents": 51},
        {"documents": 10**400},
        {"tokens": -1},
        {"tokens": 1 << 62},
        {"settings": {}},
        {"settings": {"layout": "poem"}},
        {"version": 2},
        {"tokenizer": {**good["tokenizer"], "vocab_size": 1 << 64}},
        {"outputs": []},
        {"outputs": [{**good["outputs"][0], "path": "../in.jsonl"}]},
        {"surprise": 1},
    ):
        Path(f"{prefix}.json").write_text(json.dumps({**good, **changes}))
        with pytest.raises(UserError) as caught:
            check_hashes(prefix)
        assert len(str(caught.value)) < 700 and "\n" not in str(caught.value)


# Unfinished work


@pytest.fixture
def unfinished(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, dict[str, bytes]]:
    """Interrupt a preparation before it writes its index.

    Returns:
        The prefix of the unfinished preparation; and the content of the ``.bin`` and ``.idx`` files
        that it would have written, by suffix.
    """
    run(source, tmp_path / "good")
    good = {end: (tmp_path / f"good{end}").read_bytes() for end in (".bin", ".idx")}
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_index", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out")
    return tmp_path / "out", good


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


DAMAGED_WORK = [
    ("journal.json", flip, "damaged"),
    (
        "journal.json",
        lambda path: flip(path, path.read_bytes().index(b'"records":') + 11),
        "checksum differs",
    ),
    ("journal.json", lambda path: path.write_bytes(b""), "damaged"),
    ("journal.json", lambda path: path.write_bytes(b"[" * 100_000), "damaged"),
    ("journal.json", lambda path: path.write_bytes(b'{"state": {}}'), "damaged"),
    ("journal.json", become_fifo, r"journal\.json is a FIFO"),
    ("journal.json", become_folder, r"journal\.json is a folder"),
    ("tokens.bin", flip, "differs from what was committed"),
    ("tokens.bin", lambda path: os.truncate(path, 10), "differs from what was committed"),
    ("tokens.bin", Path.unlink, "differs from what was committed"),
    ("tokens.bin", become_fifo, "is not a regular file"),
    ("lengths.i32", flip, "differs from what was committed"),
    ("counts.i32", flip, "differs from what was committed"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGED_WORK)
def test_damaged_unfinished_work_is_refused_and_restart_drops_it(
    source: Path,
    unfinished: tuple[Path, dict[str, bytes]],
    name: str,
    damage: Callable[[Path], None],
    said: str,
) -> None:
    prefix, good = unfinished
    damage(Path(f"{prefix}.partial", name))
    for _ in "ab":
        with pytest.raises(UserError, match=f"{said}.* add --restart to drop it"):
            run(source, prefix)
    run(source, prefix, restart=True)
    assert {end: Path(f"{prefix}{end}").read_bytes() for end in good} == good
    assert not Path(f"{prefix}.partial").exists()


def test_bytes_after_the_last_commit_are_ignored(
    source: Path, unfinished: tuple[Path, dict[str, bytes]]
) -> None:
    prefix, good = unfinished
    with Path(f"{prefix}.partial", "tokens.bin").open("ab") as stream:
        stream.write(b"more")
    run(source, prefix)
    assert {end: Path(f"{prefix}{end}").read_bytes() for end in good} == good


def test_files_damaged_before_their_final_rename_are_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("diffmegatron.data.prepare.prepare.publish", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(source, tmp_path / "out")
    flip(tmp_path / "out.partial" / "tokens.bin")
    with pytest.raises(UserError, match=r"out\.bin is damaged.*--restart prepares it again"):
        run(source, tmp_path / "out")
    run(source, tmp_path / "out", restart=True)
    check_hashes(tmp_path / "out")


def test_a_prefix_in_use_by_another_process_is_refused(source: Path, tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / "out.lock", "--output", ""),
        pytest.raises(UserError, match=rf"process {os.getpid()} on .* uses --output .*out; wait"),
    ):
        run(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    run(source, tmp_path / "out")


def test_a_corpus_may_be_read_again_and_again(source: Path) -> None:
    (file,) = find_files([source], "*")
    first, second = (list(read_records(file, ("text",), 1 << 20)) for _ in "ab")
    assert first == second and len(first) == 50


def test_sizes_are_those_of_the_manifest(source: Path, tmp_path: Path) -> None:
    manifest = run(source, tmp_path / "out")
    header = check_sizes(tmp_path / "out", manifest)
    assert (header.documents, header.dtype) == (50, np.dtype(np.uint16))


@pytest.mark.parametrize("key", MANIFEST_KEYS)
def test_a_flipped_digit_of_the_manifest_is_refused(key: str, source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "out")
    manifest = tmp_path / "out.json"
    text = manifest.read_text()
    start = text.index(f'"{key}"')
    digit = re.compile(r"\d").search(text, start + len(key) + 3)
    assert digit is not None
    other = str((int(digit[0]) + 1) % 10)
    manifest.write_text(text[: digit.start()] + other + text[digit.end() :])
    verified = CliRunner().invoke(app, ["data", "verify", str(tmp_path / "out")])
    assert verified.exit_code == 1 and "checksum" in verified.output


def test_a_manifest_without_a_checksum_is_accepted(source: Path, tmp_path: Path) -> None:
    manifest = run(source, tmp_path / "out")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content.pop("checksum")
    (tmp_path / "out.json").write_text(json.dumps(content))
    assert check_hashes(tmp_path / "out") == manifest.model_copy(update={"checksum": None})
