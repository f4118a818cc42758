"""``diffmegatron prepare``: a corpus becomes ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``.

Work in progress lies in the folder ``PREFIX.partial`` (a :class:`Journal`); the three files appear
under their names only when they are complete, the manifest last. A run that was killed at any
moment goes on from its last commit, and its files are byte for byte those of a run that was not.
"""

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import Any

import numpy as np

from diffmegatron.data.corpus import CorpusFile, find_files
from diffmegatron.data.encode import EncodedBatch, EncodeSettings, Reject, loaded
from diffmegatron.data.index_file import write_index
from diffmegatron.data.journal import (
    Journal,
    committed_state,
    remove_journal,
    replace_durably,
    sync_folder,
)
from diffmegatron.data.manifest import (
    FileRecord,
    Manifest,
    TokenizerRecord,
    hash_file,
    length_histogram,
    manifest_path,
    read_manifest,
)
from diffmegatron.data.pool import Position, encode_in_order
from diffmegatron.data.prepare_progress import PrepareProgress
from diffmegatron.errors import UserError

TOKENS, LENGTHS, REJECTS = "tokens.bin", "lengths.i32", "rejects.jsonl"
# Below this many documents one bad one is a large share; the limit then holds at the end only.
_EARLY_CHECK = 1000


@dataclasses.dataclass
class Counts:
    """Running totals of a preparation."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    rejected: int = 0
    empty: int = 0

    def add(self, batch: EncodedBatch) -> None:
        """Count a batch."""
        self.documents += len(batch.lengths)
        self.tokens += len(batch.tokens)
        self.text_bytes += batch.text_bytes
        self.rejected += len(batch.rejects)
        self.empty += batch.empty


def prepare(
    inputs: list[Path],
    output_prefix: Path,
    tokenizer: str,
    text_field: str = "text",
    *,
    workers: int = 1,
    pattern: str = "*",
    max_document_bytes: int = 1 << 26,
    max_reject_share: float = 0.05,
    commit_seconds: float = 10.0,
    show_progress: bool = True,
) -> Manifest:
    """Tokenise a corpus into Megatron's IndexedDataset files and a manifest.

    A prefix that these inputs and settings have filled before is left as it is.

    Args:
        inputs: JSONL (plain, .gz, .zst), Parquet, plain-text files, or folders of them; a
            plain-text file is one document.
        output_prefix: the three files are this plus ``.bin``, ``.idx`` and ``.json``.
        tokenizer: see :func:`diffmegatron.data.tokenizers.load_tokenizer`.
        text_field: key of a JSON line, or column of a Parquet file, that holds the text.
        workers: processes that tokenise; 1 does it in this one.
        pattern: which files of a folder count, such as ``*.py``.
        max_document_bytes: a longer document is rejected.
        max_reject_share: the share of unusable documents above which the corpus is refused.
        commit_seconds: how much work a kill may cost.

    Raises:
        UserError: an input cannot be read, no document is usable, too many are not, or the
            prefix holds something else.
    """
    settings = EncodeSettings(tokenizer, text_field)
    loaded(tokenizer)
    files = find_files(inputs, pattern)
    recorded = {**dataclasses.asdict(settings), "max_document_bytes": max_document_bytes}
    recorded["tokenizer_sha256"] = loaded(tokenizer).sha256
    if manifest_path(output_prefix).exists() and not _partial(output_prefix).exists():
        return _already_prepared(output_prefix, files, recorded)
    identity = {"settings": recorded, "files": [_identity(file.path) for file in files]}
    state = committed_state(_partial(output_prefix))
    if state is not None and state["identity"] != identity:
        raise UserError(
            f"{_partial(output_prefix)} is the unfinished work of other inputs or settings; run "
            "those again to finish it, or delete it"
        )
    if state is None or not state["finished"]:
        with PrepareProgress(files, show_progress) as progress:
            run = _Run(output_prefix, files, settings, identity, state, progress)
            run.encode(workers, max_document_bytes, max_reject_share, commit_seconds)
            run.finish(recorded)
    return _publish(output_prefix)


class _Run:
    """One run over the rest of a corpus, from the last commit to the finished journal."""

    def __init__(
        self,
        prefix: Path,
        files: list[CorpusFile],
        settings: EncodeSettings,
        identity: dict[str, Any],
        state: dict[str, Any] | None,
        progress: PrepareProgress,
    ) -> None:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self.prefix, self.files, self.settings, self.identity = prefix, files, settings, identity
        self.progress = progress
        self.folder = _partial(prefix)
        self.journal = Journal(self.folder, (TOKENS, LENGTHS, REJECTS))
        self.position = Position(**state["position"]) if state else Position()
        self.counts = Counts(**state["counts"]) if state else Counts()
        self.first_reject: str = state["first_reject"] if state else ""
        self.digest = hashlib.sha256()
        with (self.folder / TOKENS).open("rb") as stream:
            while part := stream.read(1 << 24):
                self.digest.update(part)

    def encode(
        self, workers: int, max_bytes: int, max_reject_share: float, commit_seconds: float
    ) -> None:
        """Tokenise what is left, committing as it goes."""
        committed = time.monotonic()
        batches = encode_in_order(self.files, self.position, self.settings, workers, max_bytes)
        for position, batch in batches:
            self._append(batch)
            self.position = position
            self.progress.update(position, self.counts)
            if time.monotonic() - committed >= commit_seconds:
                self._commit(finished=False)
                if self.counts.documents + self.counts.rejected >= _EARLY_CHECK:
                    self._check_rejects(max_reject_share)
                committed = time.monotonic()
        self._commit(finished=False)
        self._check_rejects(max_reject_share)

    def _append(self, batch: EncodedBatch) -> None:
        self.journal.append(TOKENS, batch.tokens.data)
        self.digest.update(batch.tokens.data)
        self.journal.append(LENGTHS, batch.lengths.data)
        for reject in batch.rejects:
            self.first_reject = self.first_reject or _sentence(reject)
            self.journal.append(REJECTS, reject.to_json())
        self.counts.add(batch)

    def _commit(self, *, finished: bool) -> None:
        self.journal.commit(
            {
                "identity": self.identity,
                "position": dataclasses.asdict(self.position),
                "counts": dataclasses.asdict(self.counts),
                "first_reject": self.first_reject,
                "finished": finished,
            }
        )

    def _check_rejects(self, limit: float) -> None:
        bad, seen = self.counts.rejected, self.counts.documents + self.counts.rejected
        if bad <= limit * seen:
            return
        self.journal.close()
        raise UserError(
            f"{bad} of {seen} documents cannot be used, more than the share of {limit:g} that is "
            f"allowed; the first is {self.first_reject}; all are in {self.folder / REJECTS}"
        )

    def finish(self, recorded: dict[str, Any]) -> None:
        """Write index and manifest, and mark the journal as ready to be published."""
        if not self.counts.documents:
            self.journal.close()
            remove_journal(self.folder)
            names = ", ".join(dict.fromkeys(str(file.path) for file in self.files[:3]))
            raise UserError(
                f"the corpus holds no document with text ({len(self.files)} files: {names}"
                f"{', ...' if len(self.files) > 3 else ''}); check the input"
            )
        tokenizer, dtype = loaded(self.settings.tokenizer), self.settings.dtype()
        lengths = np.memmap(self.folder / LENGTHS, dtype=np.int32, mode="r")
        index = self.folder / "index.idx"
        write_index(index, lengths, dtype, np.arange(len(lengths) + 1))
        manifest = Manifest(
            tokenizer=TokenizerRecord(
                name=tokenizer.name,
                sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                end_of_document=tokenizer.end_of_document,
            ),
            settings=recorded,
            **dataclasses.asdict(self.counts),
            lengths=length_histogram(lengths),
            inputs=tuple(_file_record(file.path) for file in self.files),
            outputs=(
                FileRecord(
                    path=f"{self.prefix.name}.bin",
                    bytes=self.counts.tokens * dtype.itemsize,
                    sha256=self.digest.hexdigest(),
                ),
                FileRecord(
                    path=f"{self.prefix.name}.idx",
                    bytes=index.stat().st_size,
                    sha256=hash_file(index),
                ),
            ),
        )
        content = manifest.model_dump_json(indent=1) + "\n"
        replace_durably(self.folder / "manifest.json", content.encode())
        self._commit(finished=True)
        self.journal.close()


def _publish(prefix: Path) -> Manifest:
    """Rename finished files to their places; each step may be repeated after a kill."""
    folder = _partial(prefix)
    targets = {TOKENS: ".bin", "index.idx": ".idx", "manifest.json": ".json"}
    if (folder / REJECTS).exists() and (folder / REJECTS).stat().st_size:
        targets = {REJECTS: ".rejects.jsonl", **targets}
    for name, suffix in targets.items():
        if (folder / name).exists():
            (folder / name).replace(f"{prefix}{suffix}")
    sync_folder(prefix.parent)
    remove_journal(folder)
    return read_manifest(prefix)


def _already_prepared(prefix: Path, files: list[CorpusFile], recorded: dict[str, Any]) -> Manifest:
    """The manifest at ``prefix`` where it was made of these very files with these settings."""
    manifest = read_manifest(prefix)
    sizes = [(str(file.path), file.path.stat().st_size) for file in files]
    same = (
        manifest.settings == recorded
        and [(record.path, record.bytes) for record in manifest.inputs] == sizes
        and all(hash_file(Path(record.path)) == record.sha256 for record in manifest.inputs)
    )
    if not same:
        raise UserError(
            f"{manifest_path(prefix)} was prepared from other inputs or settings; choose another "
            "--output or delete it"
        )
    return manifest


def _partial(prefix: Path) -> Path:
    return Path(f"{prefix}.partial")


def _identity(path: Path) -> list[str | int]:
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]


def _file_record(path: Path) -> FileRecord:
    return FileRecord(path=str(path), bytes=path.stat().st_size, sha256=hash_file(path))


def _sentence(reject: Reject) -> str:
    return f"{reject.file} line {reject.line}: {reject.reason}"
