"""``diffmegatron prepare``: a corpus becomes ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``.

Work in progress lies in the folder ``PREFIX.partial`` (a :class:`Journal`); the three files appear
under their names only when they are complete, the manifest last. A run that was killed at any
moment goes on from its last commit, and its files are byte for byte those of a run that was not.
"""

import dataclasses
import hashlib
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from diffmegatron.data.corpus import CorpusFile, find_files
from diffmegatron.data.encode import Deduplicator, EncodedBatch, EncodeSettings, loaded
from diffmegatron.data.index_file import write_index
from diffmegatron.data.journal import (
    Journal,
    committed_state,
    remove_journal,
    replace_durably,
    sync_folder,
)
from diffmegatron.data.layouts import Fields, Layout
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

TOKENS, LENGTHS, COUNTS, DIGESTS = "tokens.bin", "lengths.i32", "counts.i32", "digests.bin"
REJECTS = "rejects.jsonl"
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
    duplicates: int = 0

    def add(self, batch: EncodedBatch, duplicates: int) -> None:
        """Count a batch."""
        self.documents += len(batch.counts)
        self.tokens += len(batch.tokens)
        self.text_bytes += batch.text_bytes
        self.rejected += len(batch.rejects)
        self.empty += batch.empty
        self.duplicates += duplicates


def prepare(
    inputs: list[Path],
    output_prefix: Path,
    tokenizer: str,
    text_field: str = "text",
    *,
    workers: int = 1,
    pattern: str = "*",
    layout: Layout = "text",
    prompt_field: str = "prompt",
    response_field: str = "response",
    messages_field: str = "messages",
    id_field: str | None = None,
    deduplicate: bool = False,
    max_document_bytes: int = 1 << 26,
    max_reject_share: float = 0.05,
    restart: bool = False,
    commit_seconds: float = 10.0,
    show_progress: bool = True,
) -> Manifest:
    """Tokenise a corpus into Megatron's IndexedDataset files and a manifest.

    A prefix that these inputs and settings have filled before is left as it is.

    Args:
        inputs: JSONL (plain, .gz, .zst), Parquet, plain-text files, or folders of them; a
            plain-text file is one document.
        output_prefix: the three files are this plus ``.bin``, ``.idx`` and ``.json``; documents
            that could not be used are listed in ``.rejects.jsonl``.
        tokenizer: see :func:`diffmegatron.data.tokenizers.load_tokenizer`.
        text_field: key of a JSON line, or column of a Parquet file, that holds the text.
        workers: processes that tokenise; 1 does it in this one.
        pattern: which files of a folder count, such as ``*.py``.
        layout: ``text``, or for fine-tuning ``instruction`` or ``chat`` (see
            :class:`diffmegatron.data.layouts.Fields`, also for the next three).
        prompt_field: of ``instruction``; not learnt.
        response_field: of ``instruction``; learnt.
        messages_field: of ``chat``; what the assistant says is learnt.
        id_field: names a document in the rejects file, beside its file and line.
        deduplicate: drop a document whose token ids equal an earlier one's.
        max_document_bytes: a longer document is rejected.
        max_reject_share: the share of unusable documents above which the corpus is refused.
        restart: drop the unfinished work of other inputs or settings at this prefix.
        commit_seconds: how much work a kill may cost.
        show_progress: a progress line on standard error.

    Raises:
        UserError: an input cannot be read, the prefix cannot be written, no document is usable,
            too many are not, or the prefix holds something else.
    """
    _check_prefix(output_prefix)
    fields = Fields(layout, text_field, prompt_field, response_field, messages_field, id_field)
    settings = EncodeSettings(tokenizer, fields, deduplicate)
    recorded = {
        "tokenizer_sha256": loaded(tokenizer).sha256,
        **dataclasses.asdict(fields),
        "deduplicate": deduplicate,
        "max_document_bytes": max_document_bytes,
    }
    files = find_files(inputs, pattern)
    folder = _partial(output_prefix)
    if manifest_path(output_prefix).exists() and not folder.exists():
        return _already_prepared(output_prefix, files, recorded)
    identity = {"settings": recorded, "files": [_identity(file.path) for file in files]}
    try:
        state = _unfinished(folder, identity, restart=restart)
        if state is None or not state["finished"]:
            with PrepareProgress(files, show_progress) as progress:
                run = _Run(output_prefix, files, settings, identity, state)
                run.encode(workers, max_reject_share, commit_seconds, progress)
                run.finish()
        return _publish(output_prefix)
    except OSError as error:
        raise UserError(
            f"cannot write {error.filename or folder}: {error.strerror}; mend that and run the "
            "same command again, it goes on where it was"
        ) from None


def _check_prefix(prefix: Path) -> None:
    """What a prefix is, said to whoever gives a folder or one of the files."""
    if prefix.is_dir():
        raise UserError(
            f"--output {prefix} is a folder; give a name in it, such as {prefix}/corpus"
        )
    if prefix.suffix in (".bin", ".idx", ".json"):
        raise UserError(
            f"--output {prefix} becomes {prefix}.bin and more; give {prefix.with_suffix('')}"
        )


def _unfinished(folder: Path, identity: dict[str, Any], *, restart: bool) -> dict[str, Any] | None:
    """The last commit of this very preparation, or None to begin it."""
    state = committed_state(folder)
    if state is None or state["identity"] == identity:
        return state
    if restart:
        remove_journal(folder)
        return None
    before, now = state["identity"]["settings"], identity["settings"]
    others = [f"{name} {before.get(name)!r}" for name in now if before.get(name) != now[name]]
    if state["identity"]["files"] != identity["files"]:
        others.append("other input files")
    raise UserError(
        f"{folder} holds an unfinished preparation with {', '.join(others)}; finish that one with "
        "its own command, or add --restart to drop it and begin this one"
    )


class _Run:
    """One run over the rest of a corpus, from the last commit to the finished journal."""

    def __init__(
        self,
        prefix: Path,
        files: list[CorpusFile],
        settings: EncodeSettings,
        identity: dict[str, Any],
        state: dict[str, Any] | None,
    ) -> None:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        self.prefix, self.files, self.settings, self.identity = prefix, files, settings, identity
        self.folder = _partial(prefix)
        self.journal = Journal(self.folder, (TOKENS, LENGTHS, COUNTS, DIGESTS, REJECTS))
        self.position = Position(**state["position"]) if state else Position()
        self.counts = Counts(**state["counts"]) if state else Counts()
        self.first_reject: str = state["first_reject"] if state else ""
        self.digest = hashlib.sha256()
        with (self.folder / TOKENS).open("rb") as stream:
            while part := stream.read(1 << 24):
                self.digest.update(part)
        self.deduplicator = (
            Deduplicator((self.folder / DIGESTS).read_bytes())
            if identity["settings"]["deduplicate"]
            else None
        )

    def encode(
        self,
        workers: int,
        max_reject_share: float,
        commit_seconds: float,
        progress: PrepareProgress,
    ) -> None:
        """Tokenise what is left, committing as it goes."""
        progress.update(self.position, self.counts)
        committed = time.monotonic()
        max_bytes = self.identity["settings"]["max_document_bytes"]
        batches = encode_in_order(self.files, self.position, self.settings, workers, max_bytes)
        for position, batch in batches:
            self._append(batch)
            self.position = position
            progress.update(position, self.counts)
            if time.monotonic() - committed >= commit_seconds:
                self._commit(finished=False)
                if self.counts.documents + self.counts.rejected >= _EARLY_CHECK:
                    self._check_rejects(max_reject_share)
                committed = time.monotonic()
        self._commit(finished=False)
        self._check_rejects(max_reject_share)

    def _append(self, batch: EncodedBatch) -> None:
        duplicates = self.deduplicator.drop_duplicates(batch) if self.deduplicator else 0
        self.journal.append(TOKENS, batch.tokens.data)
        self.digest.update(batch.tokens.data)
        self.journal.append(LENGTHS, batch.lengths.data)
        self.journal.append(COUNTS, batch.counts.data)
        if self.deduplicator:
            self.journal.append(DIGESTS, b"".join(batch.digests))
        for reject in batch.rejects:
            self.first_reject = self.first_reject or str(reject)
            self.journal.append(REJECTS, reject.to_json())
        self.counts.add(batch, duplicates)

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
        if bad > limit * seen:
            self.journal.close()
            raise UserError(
                f"{bad} of {seen} documents cannot be used, more than the share --max-reject-share "
                f"{limit:g}; the first is {self.first_reject}{self._columns()}; all are in "
                f"{self.folder / REJECTS}; name the right fields ({self._field_options()}) with "
                "--restart, or allow more and go on"
            )

    def _field_options(self) -> str:
        options = {
            "text": "--text-field",
            "instruction": "--prompt-field, --response-field",
            "chat": "--messages-field",
        }
        return options[self.settings.fields.layout]

    def _columns(self) -> str:
        """The columns of a Parquet file that lacks one; its reader sees those it asks for only."""
        required = set(self.settings.fields.required)
        for file in self.files:
            if file.format == "parquet" and self.first_reject.startswith(f"{file.path} line"):
                with suppress(OSError, pyarrow.ArrowException):
                    names = pyarrow.parquet.read_schema(file.path).names
                    return "" if required <= set(names) else f", its columns: {', '.join(names)}"
        return ""

    def finish(self) -> None:
        """Write index and manifest, and mark the journal as ready to be published."""
        if not self.counts.documents:
            self._refuse_empty()
        index = self.folder / "index.idx"
        lengths = np.memmap(self.folder / LENGTHS, dtype=np.int32, mode="r")
        counts = np.memmap(self.folder / COUNTS, dtype=np.int32, mode="r")
        write_index(index, lengths, counts, self.settings.dtype())
        content = self._manifest(index, lengths, counts).model_dump_json(indent=1) + "\n"
        replace_durably(self.folder / "manifest.json", content.encode())
        self._commit(finished=True)
        self.journal.close()

    def _refuse_empty(self) -> None:
        self.journal.close()
        remove_journal(self.folder)
        names = ", ".join(str(file.path) for file in self.files[:3])
        raise UserError(
            f"the corpus holds no document with text ({len(self.files)} files: {names}"
            f"{', ...' if len(self.files) > 3 else ''}); check the input and its layout"
        )

    def _manifest(self, index: Path, lengths: np.ndarray, counts: np.ndarray) -> Manifest:
        tokenizer = loaded(self.settings.tokenizer)
        return Manifest(
            tokenizer=TokenizerRecord(
                name=tokenizer.name,
                sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                end_of_document=tokenizer.end_of_document,
            ),
            settings=self.identity["settings"],
            **dataclasses.asdict(self.counts),
            lengths=length_histogram(lengths, counts),
            inputs=tuple(
                FileRecord(path=str(file.path), bytes=file.size, sha256=hash_file(file.path))
                for file in self.files
            ),
            outputs=(
                FileRecord(
                    path=f"{self.prefix.name}.bin",
                    bytes=self.counts.tokens * self.settings.dtype().itemsize,
                    sha256=self.digest.hexdigest(),
                ),
                FileRecord(
                    path=f"{self.prefix.name}.idx",
                    bytes=index.stat().st_size,
                    sha256=hash_file(index),
                ),
            ),
        )


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
    same = (
        manifest.settings == recorded
        and [(record.path, record.bytes) for record in manifest.inputs]
        == [(str(file.path), file.size) for file in files]
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
