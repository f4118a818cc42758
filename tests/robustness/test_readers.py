"""Tests that every reader of files returns a value or fails with one sentence.

The files have random bytes, or random damage.
"""

import base64
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import strategies as st

from diffmegatron.attention.kinds.selected_heads import read_selected
from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_manifest import MANIFEST
from diffmegatron.config.load import check_recipe, load_stages
from diffmegatron.data.index.token_store import open_corpus
from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.data.prepare.encode import encode_batch
from diffmegatron.data.prepare.journal import (
    Journal,
    JournalState,
    PreparationIdentity,
    last_commit,
)
from diffmegatron.data.prepare.parts import Part, merge
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.sampling.array_cache import cached_arrays
from diffmegatron.data.tokenizers import END_OF_TEXT, load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.evaluation.result_file import RecordFile
from diffmegatron.evaluation.suites.classification import TASKS
from diffmegatron.evaluation.suites.hallucination import DATASETS
from diffmegatron.evaluation.suites.math import BENCHMARKS
from diffmegatron.evaluation.targets import find_targets
from diffmegatron.files import read_json, write_sealed
from diffmegatron.hf.configuration import model_section, read_config
from diffmegatron.hf.pretrained_files import DTYPES_NAME, Dtypes, PretrainedTensors, keep_original
from diffmegatron.hf.tokenizer import convert
from diffmegatron.hf.weight_mapping import table
from diffmegatron.measurements.cache import read_measurements, write_measurements
from diffmegatron.training.monitoring.metrics import MetricsWriter, read_metrics
from tests.checkpoints import sign, write_checkpoint
from tests.conftest import TINY
from tests.pretrained import write_pretrained
from tests.robustness.cases import check_sentence, for_all
from tests.unit.measurements.test_cache import MEASURED

Read = Callable[[], object]


class Reader(NamedTuple):
    """A reader of one kind of file.

    Attributes:
        name: name of the test case.
        make: function that writes a good file, and other files that belong to it, into a folder;
            it returns the file's path and a function that reads the file.
    """

    name: str
    make: Callable[[Path], tuple[Path, Read]]


STAGES = "stages: [{name: a}, {name: b, training: {steps: 4}}]\n"
TEXTS = [f"document {number} " * (1 + number % 7) for number in range(20)]
LINES = b"".join(json.dumps({"text": text, "id": 1}).encode() + b"\n" for text in TEXTS)


def stages(folder: Path) -> tuple[Path, Read]:
    path = folder / "recipe.yaml"
    path.write_text(TINY.format(run_dir="run", corpus="corpus") + STAGES)
    return path, lambda: load_stages(path)


def heads(folder: Path) -> tuple[Path, Read]:
    path = folder / "heads.yaml"
    model = "model: {num_layers: 2, num_heads: 4, fingerprint: 0f1e2d}\n"
    path.write_text(model + "method: entropy\nshare: 0.5\nheads: [[0, 3], [1, 2]]\n")
    return path, lambda: read_selected(str(path), may_be_missing=False)


def any_json(folder: Path) -> tuple[Path, Read]:
    path = folder / "any.json"
    path.write_text('{"steps": [1, 2.5e3, null], "\\u00e9": {"a": true, "b": "text"}}')
    return path, lambda: read_json(path, dict[str, Any])


def measurements(folder: Path) -> tuple[Path, Read]:
    path = folder / "measurements.json"
    write_measurements(path, MEASURED)
    return path, lambda: read_measurements(path)


def checkpoint(name: str) -> Reader:
    """Return the reader of one file of a checkpoint.

    Before each read, the checksums of the damaged files are written to the manifest. Otherwise, the
    files would be rejected before their content is read. A damaged manifest is read unchanged.
    """

    def make(folder: Path) -> tuple[Path, Read]:
        directory = write_checkpoint(folder, 7)

        def read() -> None:
            if name != MANIFEST:
                sign(directory)
            tensors = open_checkpoint(directory).tensors
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                for tensor in tensors.names():
                    tensors.read_tensor(kind, tensor)

        def restored() -> None:
            (directory / MANIFEST).write_bytes(manifest)
            read()

        manifest = (directory / MANIFEST).read_bytes()
        return directory / name, read if name == MANIFEST else restored

    return Reader(f"checkpoint {name}", make)


def corpus(layout: Any, suffix: str, parts: int = 0) -> Reader:
    """Return the reader of one file of a prepared corpus; the reader reads the whole corpus."""

    def make(folder: Path) -> tuple[Path, Read]:
        content = [{"text": text, "prompt": text, "response": text[:9]} for text in TEXTS]
        lines = b"".join(json.dumps(each).encode() + b"\n" for each in content)
        (folder / "in.jsonl").write_bytes(lines)
        prefix = folder / "out"
        for part in [Part(number + 1, parts) for number in range(parts)] or [None]:
            prepare(
                [folder / "in.jsonl"],
                prefix,
                "bytes",
                layout=layout,
                part=part,
                show_progress=False,
            )
        if parts:
            merge(prefix, show_progress=False)

        def read() -> None:
            opened = open_corpus(str(prefix))
            opened.check_index()
            int(opened.tokens[:].sum())
            for document in range(len(opened.lengths) if opened.manifest.is_fine_tuning else 0):
                opened.loss_mask(document)

        return Path(f"{prefix}{suffix}"), read

    return Reader(f"{layout} corpus{' in parts' if parts else ''} {suffix}", make)


def unmerged_part(suffix: str) -> Reader:
    """Return the reader of one file of a corpus part; the reader merges two parts."""

    def make(folder: Path) -> tuple[Path, Read]:
        (folder / "in.jsonl").write_bytes(LINES)
        for part in (Part(1, 2), Part(2, 2)):
            inputs = [folder / "in.jsonl"]
            prepare(inputs, folder / "out", "bytes", part=part, show_progress=False)

        def read() -> None:
            (folder / "out.json").unlink(missing_ok=True)
            merge(folder / "out", show_progress=False)

        return folder / f"out.parts/00002-of-00002{suffix}", read

    return Reader(f"part {suffix}", make)


def archive(suffix: str, pack: Callable[[Path], bytes]) -> Reader:
    """Return the reader of an input file of ``prepare`` with this suffix."""
    settings = PrepareSettings("bytes", id_field="id", deduplicate=True)

    def make(folder: Path) -> tuple[Path, Read]:
        path = folder / f"in{suffix}"
        path.write_bytes(pack(path))

        def read() -> None:
            (file,) = find_files([path], "*")
            records = list(read_records(file, settings.columns, 1 << 20))
            found = encode_batch([(file, record) for record in records], settings)
            assert len(found.counts) + len(found.rejects) + found.empty == len(records)

        return path, read

    return Reader(f"in{suffix}", make)


def parquet(path: Path) -> bytes:
    table = pyarrow.table({"text": TEXTS, "id": range(len(TEXTS))})
    pyarrow.parquet.write_table(table, path, row_group_size=10)
    return path.read_bytes()


def journal(folder: Path) -> tuple[Path, Read]:
    """Write a journal, and return the result of :func:`resealed` for its state.

    The state has the number of committed bytes of each file of the journal.
    """
    identity = PreparationIdentity(settings={"layout": "text"}, files=(("in.jsonl", 3, 4),))
    with Journal(folder / "out", ("tokens",), None) as begun:
        begun.append("tokens", b"1234" * 20)
        begun.commit(JournalState(identity=identity))

    def read() -> None:
        Journal(folder / "out", ("tokens",), last_commit(folder / "out")).close()

    return resealed(folder, folder / "out/journal.json", read)


def cache(folder: Path) -> tuple[Path, Read]:
    """Write a cache entry, and return the result of :func:`resealed` for its table of contents.

    A damaged entry is built again, so every read returns the right array.
    """
    ends = np.arange(50, dtype=np.int64)

    def read() -> None:
        arrays, _ = cached_arrays(folder / "cache", ("key",), lambda: ({"ends": ends}, {"a": 1}))
        assert np.array_equal(arrays["ends"], ends)

    read()
    (contents,) = folder.glob("cache/*/contents.json")
    return resealed(folder, contents, read)


def resealed(folder: Path, path: Path, read: Read) -> tuple[Path, Read]:
    """Return a file with the content of a sealed file, and a function that seals and reads it.

    The seal is a checksum. The function renews the checksum, so that it does not reveal the damage.
    """
    content = folder / "content"
    content.write_bytes(path.read_bytes().split(b"\n")[0])

    def seal_and_read() -> None:
        write_sealed(path, content.read_text(errors="replace"))
        read()

    return content, seal_and_read


def metrics(folder: Path) -> tuple[Path, Read]:
    """Write a run's metrics; return their path and a function that reads and continues them."""
    with MetricsWriter(folder, -1) as writer:
        for step in range(5):
            writer.write(step, {"train/loss": 2.5, "train/lr": 1e-3})

    def read() -> None:
        read_metrics(folder)
        MetricsWriter(folder, 3).close()
        assert all(entry["step"] <= 3 for entry in read_metrics(folder))

    return folder / "metrics.jsonl", read


def tiktoken_file(suffix: str) -> Reader:
    """Return the reader of a tiktoken file (tokens and their ranks) or of its JSON description."""
    ranks = [b"%s %d\n" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]
    ranks += [b"%s %d\n" % (base64.b64encode(b"word"), 256)]
    description = {"pat_str": r"\w+|\s+|\W", "special_tokens": {END_OF_TEXT: 257, "<|a|>": 258}}

    def make(folder: Path) -> tuple[Path, Read]:
        path = folder / "own.tiktoken"
        path.write_bytes(b"".join(ranks))
        path.with_suffix(".json").write_text(json.dumps(description))
        return path.with_suffix(suffix), lambda: use(path)

    return Reader(f"own{suffix}", make)


def tokenizer_folder(name: str) -> Reader:
    """Return the reader of one file of a Hugging Face tokenizer."""

    def make(folder: Path) -> tuple[Path, Read]:
        convert(load_tokenizer("bytes").encoding).save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
        return folder / name, lambda: use(folder)

    return Reader(name, make)


def use(tokenizer: Path) -> None:
    loaded = load_tokenizer(str(tokenizer))
    loaded.encode("a few words")
    assert loaded.sha256 and 0 <= loaded.end_of_document < loaded.vocab_size


def pretrained(name: str) -> Reader:
    """Return the reader of one file of a pretrained model; the reader reads all weights."""

    def make(folder: Path) -> tuple[Path, Read]:
        write_pretrained(folder / "hf", "qwen3")
        keep_original(PretrainedTensors(folder / "hf"), folder / "kept")
        at = folder / "kept" if name == "dtypes.json" else folder / "hf"

        def read() -> None:
            config, source = read_config(folder / "hf"), PretrainedTensors(folder / "hf")
            values = {"run_dir": "run", "model": model_section(config, 0), **REST}
            model = check_recipe(values, "the model").model
            source.check(table(model), tied=model.tied_embeddings)
            assert len(dict(source.stream(table(model)))) == 2 * 11 + 3
            assert read_json(folder / "kept" / DTYPES_NAME, Dtypes).usual == "F32"

        return at / name, read

    return Reader(f"pretrained {name}", make)


def records(folder: Path) -> tuple[Path, Read]:
    """Write the records of an evaluation; return their path and a function that resumes it."""
    path, header = folder / "records.jsonl", {"suite": "loss", "items": "0f1e"}
    with RecordFile(path, header) as file:
        for number in range(5):
            file.add(f"text/{number}", {"nats": 0.5 * number, "tokens": number})

    def read() -> None:
        with RecordFile(path, header) as file:
            assert all(isinstance(record, dict) for record in file.records.values())

    return path, read


def data_set(file: str, content: str, read: Callable[[Path], object]) -> Reader:
    """Return the reader of one file of a published data set."""

    def make(folder: Path) -> tuple[Path, Read]:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)
        return folder / file, lambda: read(folder)

    return Reader(file, make)


def target(folder: Path) -> tuple[Path, Read]:
    """Write a model to evaluate; return its ``config.json`` and a function that reads the model."""
    write_pretrained(folder / "hf", "diffllama")

    def read() -> None:
        (found,) = find_targets([folder / "hf"], folder)
        assert found.context > 0 and found.start_token >= 0 and found.attention.num_heads

    return folder / "hf/config.json", read


REST = {
    "data": {"tokenizer": "bytes", "sources": [{"path": "corpus"}]},
    "training": {"seq_length": 8, "global_batch_size": 1, "steps": 1},
    "optimizer": {"lr": 1.0},
}
READERS = [
    Reader("recipe.yaml", stages),
    Reader("heads.yaml", heads),
    Reader("any.json", any_json),
    Reader("measurements.json", measurements),
    checkpoint(MANIFEST),
    checkpoint("state.json"),
    checkpoint("recipe.yaml"),
    checkpoint("rank_00000.safetensors"),
    corpus("text", ".json"),
    corpus("text", ".idx"),
    corpus("text", ".bin"),
    corpus("instruction", ".idx"),
    corpus("text", ".json", parts=2),
    unmerged_part(".json"),
    unmerged_part(".idx"),
    archive(".jsonl", lambda path: LINES),
    archive(".jsonl.gz", lambda path: gzip.compress(LINES)),
    archive(".jsonl.zst", lambda path: zstandard.ZstdCompressor().compress(LINES)),
    archive(".txt", lambda path: "".join(TEXTS).encode()),
    archive(".parquet", parquet),
    Reader("journal.json", journal),
    Reader("contents.json", cache),
    Reader("metrics.jsonl", metrics),
    tiktoken_file(".tiktoken"),
    tiktoken_file(".json"),
    tokenizer_folder("tokenizer.json"),
    tokenizer_folder("tokenizer_config.json"),
    pretrained("config.json"),
    pretrained("model.safetensors"),
    pretrained("dtypes.json"),
    Reader("records.jsonl", records),
    Reader("target", target),
    data_set(
        "trec_train.txt",
        "DESC:manner How is it ?\nLOC:city Where is it ?\n" * 5,
        lambda folder: TASKS["trec-fine"].train.examples(folder),
    ),
    data_set(
        "banking77_test.csv",
        'text,category\n"Where, then?",card_arrival\n' * 5,
        lambda folder: TASKS["banking77"].test.examples(folder),
    ),
    data_set(
        "clinc150.json",
        '{"train": [["a", "b"], ["c", "d e"]], "test": [["a", "b"]]}',
        lambda folder: TASKS["clinic150"].train.examples(folder),
    ),
    data_set(
        "gsm8k_test.jsonl",
        '{"question": "2 and 3?", "answer": "It is <<2+3=5>>5.\\n#### 5"}\n' * 5,
        lambda folder: BENCHMARKS["gsm8k"].examples(folder),
    ),
    data_set(
        "svamp.json",
        '[{"Body": "Ann has 3.", "Question": "How many?", "Answer": 3.0}]',
        lambda folder: BENCHMARKS["svamp"].examples(folder),
    ),
    data_set(
        "math_test.jsonl",
        '{"problem": "2 and 3?", "solution": "It is $\\\\boxed{\\\\frac{10}{2}}$."}\n' * 5,
        lambda folder: BENCHMARKS["math"].examples(folder),
    ),
    data_set(
        "asdiv_test.jsonl",
        '{"body": "Ann has 3.", "question": "How many?", "answer": "3 (pens)"}\n' * 5,
        lambda folder: BENCHMARKS["asdiv"].examples(folder),
    ),
    data_set(
        "tabmwp_test.json",
        '{"1": {"question": "Which?", "choices": ["a", "b"], "answer": "a", "table_title": null, '
        '"table": "x | 1"}}',
        lambda folder: BENCHMARKS["tabmwp"].examples(folder),
    ),
    data_set(
        "qasper.jsonl",
        '{"input": "Who?", "context": "It was Ann.", "answers": ["Ann"], "length": 3}\n' * 5,
        lambda folder: DATASETS["qasper"].examples(folder, 9),
    ),
]


def damaged(example: bytes) -> st.SearchStrategy[bytes]:
    """Return a strategy for copies of the example in which one to three ranges of bytes differ.

    A range is deleted, or replaced by a short sequence of bytes that is repeated up to 3,000 times.
    """
    pieces = [b"", b"[", b"{", b"- ", b": ", b"&a ", b"*a", b"!", b"\0", b"\xff", b"null", b"{}"]
    pieces += [b"-", b"9" * 100]
    other = st.sampled_from(pieces) | st.binary(max_size=8)
    places = st.tuples(
        st.integers(0, len(example)), st.integers(0, 40), other, st.sampled_from([1, 2, 20, 3_000])
    )

    def apply(changes: list[tuple[int, int, bytes, int]]) -> bytes:
        content = example
        for start, length, new, times in changes:
            content = content[:start] + new * times + content[start + length :]
        return content

    return st.lists(places, min_size=1, max_size=3).map(apply)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_a_file_of_any_bytes_is_read_or_refused(reader, tmp_path, cases, is_long):
    path, read = reader.make(tmp_path)
    read()
    example = path.read_bytes()

    def check(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read()
        except UserError as error:
            check_sentence(str(error))

    for_all(cases // 12, is_long, check, st.binary(max_size=300) | damaged(example))
