"""Tests of ``prepare``: input formats, output files, rejected documents, refused settings."""

import gzip
import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
import torch
import zstandard
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from tokenizers import models, normalizers, pre_tokenizers

from diffmegatron.data.index.corpus_manifest import CorpusManifest, hash_file
from diffmegatron.data.prepare import preparation, worker_pool
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.prepare.record_formats import UnusableError, segments
from diffmegatron.errors import UserError

TEXTS = ["first", "zweiter Text, naïve 数学", "x" * 3000, "a\nb"]


def run(inputs: Path | list[Path], prefix: Path, **options: Any) -> CorpusManifest:
    paths = inputs if isinstance(inputs, list) else [inputs]
    return prepare(paths, prefix, "bytes", show_progress=False, **options)


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)))
    return path


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(str(prefix))
    return [dataset[number].tolist() for number in range(len(dataset))]


def expected(texts: list[str]) -> list[list[int]]:
    return [[*text.encode(), 256] for text in texts]


def rejects(prefix: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(f"{prefix}.rejects.jsonl").read_text().splitlines()]


def test_files_are_those_of_megatrons_own_builder(tmp_path: Path) -> None:
    run(write_jsonl(tmp_path / "in.jsonl", TEXTS), tmp_path / "ours")
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in expected(TEXTS):
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        ours, theirs = (tmp_path / f"{name}{suffix}" for name in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


def _plain(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def _two_frames(content: bytes) -> bytes:
    compress = zstandard.ZstdCompressor().compress
    return compress(content[:100]) + compress(content[100:])


def _parquet(path: Path, texts: list[str]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "other": range(len(texts))}), path)
    return path


def test_every_format_gives_the_same_tokens(tmp_path: Path) -> None:
    content = write_jsonl(tmp_path / "plain.jsonl", TEXTS).read_bytes()
    folder = tmp_path / "folder"
    for number, text in enumerate(TEXTS):
        path = folder / f"{number}" / "document.txt"
        path.parent.mkdir(parents=True)
        path.write_bytes(text.encode("utf-8-sig" if number else "utf-8"))
    inputs = {
        "plain": tmp_path / "plain.jsonl",
        "byte order mark": _plain(tmp_path / "marked.jsonl", b"\xef\xbb\xbf" + content),
        "gz": _plain(tmp_path / "in.jsonl.gz", gzip.compress(content)),
        "zst": _plain(tmp_path / "in.jsonl.zst", _two_frames(content)),
        "parquet": _parquet(tmp_path / "in.parquet", TEXTS),
        "folder": folder,
    }
    for name, path in inputs.items():
        run(path, tmp_path / "out" / name)
        assert documents(tmp_path / "out" / name) == expected(TEXTS), name


def test_order_and_bytes_do_not_depend_on_workers(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("diffmegatron.data.prepare.worker_pool._BATCH_RECORDS", 7)
    path = write_jsonl(tmp_path / "in.jsonl", [f"document {n} " * (n % 13) for n in range(300)])
    run(path, tmp_path / "one", workers=1)
    run(path, tmp_path / "two", workers=2)
    for suffix in (".bin", ".idx"):
        assert hash_file(tmp_path / f"one{suffix}") == hash_file(tmp_path / f"two{suffix}")


def test_a_text_that_is_encoded_for_too_long_is_a_reject(tmp_path: Path, monkeypatch: Any) -> None:
    """The time of the normalizer grows with the cube of the length of a run of letters."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"end": 0, "?": 1}, unk_token="?"))
    tokenizer.normalizer = normalizers.Replace(tokenizers.Regex("(?:a*a*)(?<=b)"), "x")
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "end"}')
    texts = ["one two", "a" * 3000, "three", "four five six"]
    path = write_jsonl(tmp_path / "text.jsonl", texts)
    monkeypatch.setattr("diffmegatron.data.prepare.worker_pool._CPU_SECONDS", 0.5)
    prepare([path], tmp_path / "out", str(folder), show_progress=False, max_reject_share=0.5)
    assert documents(tmp_path / "out") == [[1, 1, 0], [1, 0], [1, 1, 1, 0]]
    (reject,) = rejects(tmp_path / "out")
    assert (reject["line"], reject["reason"]) == (
        2,
        "the tokenizer takes too much CPU time for the text",
    )


def test_a_process_for_one_batch_ends_with_its_parent(monkeypatch: Any) -> None:
    """Check that the process watches its parent before it encodes."""
    events: list[Any] = []
    monkeypatch.setattr(worker_pool, "_start_worker", lambda: events.append("watches"))
    monkeypatch.setattr(worker_pool, "encode_batch", lambda *_: "encoded")
    sender = SimpleNamespace(send=events.append)
    worker_pool._encode_and_send([], None, 1.0, sender, ())  # type: ignore[arg-type]
    assert events == ["watches", "encoded"]


def test_too_few_open_files_for_the_workers_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 30, hard))
    try:
        with pytest.raises(UserError, match=r"--workers 2 needs \d+ open files, but .*ulimit -n"):
            run(path, tmp_path / "out", workers=2)
        run(path, tmp_path / "out", workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_pattern_and_text_field(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.py").write_text("code")
    (tmp_path / "in" / "b.txt").write_text("prose")
    run(tmp_path / "in", tmp_path / "code", pattern="*.py")
    assert documents(tmp_path / "code") == expected(["code"])
    (tmp_path / "in.jsonl").write_text('{"content": "here", "text": "not here"}\n')
    run(tmp_path / "in.jsonl", tmp_path / "field", text_field="content")
    assert documents(tmp_path / "field") == expected(["here"])


def test_the_manifest_records_inputs_outputs_and_lengths(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [*TEXTS, ""])
    manifest = run(path, tmp_path / "out")
    assert (manifest.documents, manifest.empty, manifest.rejected) == (4, 1, 0)
    assert manifest.tokens == sum(map(len, expected(TEXTS)))
    assert manifest.text_bytes == manifest.tokens - 4
    assert manifest.inputs[0].sha256 == hash_file(path)
    for output in manifest.outputs:
        assert hash_file(tmp_path / output.path) == output.sha256
        assert (tmp_path / output.path).stat().st_size == output.bytes
    histogram = [(part.at_least, part.documents, part.tokens) for part in manifest.lengths]
    assert histogram[0] == (4, 2, 4 + 6) and histogram[-1] == (2048, 1, 3001)
    assert sum(part[1] for part in histogram) == 4
    assert not list(tmp_path.glob("out.partial*"))


DAMAGE = (
    (b'{"text": "\xff\xfe"}', "not UTF-8 at byte 10"),
    (b'{"text": "cut', "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'["text"]', "JSON of type list"),
    (b'{"body": "x"}', "no field 'text'"),
    (b'{"text": null}', "no field 'text'"),
    (b'{"text": 3}', "field 'text' is int"),
    (b'{"text": "\\ud800"}', "lone surrogate"),
    (b'{"text": "' + b"y" * 200_000 + b'"}', "longer than 150000 bytes"),
)


def test_every_kind_of_damage_is_counted_and_named(tmp_path: Path) -> None:
    lines = [line for damaged, _ in DAMAGE for line in (b'{"text": "good"}', damaged)]
    path = _plain(tmp_path / "in.jsonl", b"\n".join([*lines, b"", b'{"text": "last"}']))
    manifest = run(path, tmp_path / "out", max_document_bytes=150_000, max_reject_share=0.5)
    assert documents(tmp_path / "out") == expected(["good"] * len(DAMAGE) + ["last"])
    assert manifest.rejected == len(DAMAGE)
    for number, (reject, (_, reason)) in enumerate(
        zip(rejects(tmp_path / "out"), DAMAGE, strict=True)
    ):
        assert (reject["file"], reject["line"]) == (str(path), 2 * number + 2)
        assert reason in reject["reason"]


def test_a_reject_has_the_value_of_the_id_field(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"id": "a7", "text": 1}\n{"id": "a8", "text": "x"}\n')
    run(path, tmp_path / "out", id_field="id", max_reject_share=0.5)
    assert [reject["id"] for reject in rejects(tmp_path / "out")] == ["a7"]


def test_unreadable_parquet_rows_are_rejected(tmp_path: Path) -> None:
    column = pyarrow.array([b"good", b"\xff", None, b"fine"], type=pyarrow.binary())
    table = pyarrow.table({"text": column.view(pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out", max_reject_share=0.5)
    assert documents(tmp_path / "out") == expected(["good", "fine"])
    assert [reject["line"] for reject in rejects(tmp_path / "out")] == [2, 3]


def test_too_many_rejects_are_refused_with_the_first_one(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "x"}\n' * 8 + "oops\n" * 2)
    with pytest.raises(UserError, match=r"2 of 10 .*share 0\.1; .*in\.jsonl line 9: not JSON"):
        run(path, tmp_path / "out", max_reject_share=0.1)
    assert not list(tmp_path.glob("out.[bij]*"))
    assert run(path, tmp_path / "out", max_reject_share=0.2).documents == 8


def test_deduplication_is_exact(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", ["a", "b", "a", "c", "b", "a "])
    manifest = run(path, tmp_path / "out", deduplicate=True)
    assert documents(tmp_path / "out") == expected(["a", "b", "c", "a "])
    assert manifest.duplicates == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "holds no file that matches"),
        (lambda path: path.write_text(""), "holds no document with text"),
        (lambda path: path.write_text("\n\n"), "holds no document with text"),
    ],
)
def test_an_empty_corpus_is_refused_and_leaves_nothing(
    tmp_path: Path, make: Any, message: str
) -> None:
    make(tmp_path / "in.jsonl")
    with pytest.raises(UserError, match=message):
        run(tmp_path / "in.jsonl", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_preparing_again_changes_nothing_and_other_input_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    first = run(path, tmp_path / "out")
    assert run(path, tmp_path / "out") == first
    with pytest.raises(UserError, match=r"with id_field None, deduplicate False; choose another"):
        run(path, tmp_path / "out", deduplicate=True, id_field="id")
    other = write_jsonl(tmp_path / "other.jsonl", TEXTS)
    with pytest.raises(UserError, match=r"with input .*in.jsonl instead of .*other.jsonl; choose"):
        run(other, tmp_path / "out")
    with pytest.raises(
        UserError, match=r"out.json was prepared with 1 input file instead of 2; choose"
    ):
        run([path, other], tmp_path / "out")
    write_jsonl(path, [*TEXTS[:-1], "a bc"])
    with pytest.raises(UserError, match=r"with another content of .*in.jsonl; choose another"):
        run(path, tmp_path / "out")
    write_jsonl(path, TEXTS[:-1])
    with pytest.raises(UserError, match=r"with \d+ bytes of .*in.jsonl, which has \d+; choose"):
        run(path, tmp_path / "out")


def test_unfinished_work_of_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    with monkeypatch.context() as patch:
        patch.setattr(preparation, "write_index", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(path, tmp_path / "out")
    with pytest.raises(UserError, match=r"unfinished .* with deduplicate False; .* --restart"):
        run(path, tmp_path / "out", deduplicate=True)
    run(path, tmp_path / "out")
    assert documents(tmp_path / "out") == expected(TEXTS)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_missing_text_field_is_refused_with_the_existing_fields(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"content": ["a"], "url": ["b"]}), path)
    else:
        path.write_text('{"content": "a", "url": "b"}\n')
    with pytest.raises(UserError, match=r"no field 'text'.*content.*url.*\(--text-field\), or"):
        run(path, tmp_path / "out")
    # The refused run wrote no document, so another text_field needs no --restart.
    run(path, tmp_path / "out", text_field="content")
    assert documents(tmp_path / "out") == expected(["a"])


def test_changing_the_field_of_written_documents_needs_restart(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "a", "content": "b"}\n{"content": "c"}\n')
    with pytest.raises(UserError, match=r"no field 'text'.*\(--text-field\) with --restart, or"):
        run(path, tmp_path / "out")
    with pytest.raises(UserError, match=r"with text_field 'text'; .* or add --restart"):
        run(path, tmp_path / "out", text_field="content")
    run(path, tmp_path / "out", text_field="content", restart=True)
    assert documents(tmp_path / "out") == expected(["b", "c"])


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("in.txt/out", "cannot write in --output .*in.txt/out: File exists"),
        ("/proc/out", "cannot write in --output /proc/out: .*; give another"),
        ("folder", "is a folder; give a name in it, such as .*folder/corpus"),
        ("out.bin", "give .*out$"),
    ],
)
def test_an_unusable_output_prefix_is_refused(tmp_path: Path, prefix: str, message: str) -> None:
    _plain(tmp_path / "in.txt", b"text")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=message):
        run(tmp_path / "in.txt", tmp_path / prefix)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_prompts_and_responses_are_sequences_of_one_document(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "2+2=", "response": "4"}\n{"prompt": "", "response": "hi"}\n')
    manifest = run(path, tmp_path / "out", layout="instruction")
    dataset = IndexedDataset(str(tmp_path / "out"))
    assert dataset.sequence_lengths.tolist() == [4, 2, 0, 3]
    assert dataset.document_indices.tolist() == [0, 2, 4]
    assert (manifest.documents, manifest.tokens) == (2, 9)


def test_chat_segments_alternate_between_prompt_and_response() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Ciao"},
    ]
    assert segments({"messages": messages}, PrepareSettings(layout="chat")) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n",
        "Hello<|im_end|>",
        "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        "Ciao<|im_end|>",
    ]


@pytest.mark.parametrize(
    "messages",
    ["text", [], [{"role": "user", "content": "x"}], [{"role": "user"}], [["user", "x"]]],
)
def test_a_chat_without_an_answer_is_unusable(messages: Any) -> None:
    with pytest.raises(UnusableError):
        segments({"messages": messages}, PrepareSettings(layout="chat"))


def test_chat_from_parquet(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    table = pyarrow.table({"messages": [messages]})
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out", layout="chat")
    learned = documents(tmp_path / "out")[1]
    assert bytes(learned[:-1]) == b"Yes<|im_end|>" and learned[-1] == 256


def test_a_message_that_holds_a_marker_is_unusable() -> None:
    chat = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UnusableError, match=r"has '<\|im_end\|>' in it"):
        segments({"messages": chat}, PrepareSettings(layout="chat"))
