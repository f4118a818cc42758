"""Encode a corpus, or the rest of it after an interruption, and write the finished files.

Results are appended to a :class:`Journal`. Each commit records the position in the input.
"""

import dataclasses
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from diffmegatron.data.index.corpus_manifest import (
    FileRecord,
    InputRecord,
    Manifest,
    PartRecord,
    TokenizerRecord,
    document_lengths,
    hash_file,
    length_histogram,
)
from diffmegatron.data.index.index_file import write_index
from diffmegatron.data.prepare.corpus_readers import CorpusFile
from diffmegatron.data.prepare.encode import Deduplicator, EncodedBatch, loaded, token_dtype
from diffmegatron.data.prepare.journal import Journal, remove_journal
from diffmegatron.data.prepare.prepare_progress import PrepareProgress
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.prepare.worker_pool import Position, encode_in_order
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, open_file, printable, shorten, write_durably
from diffmegatron.section import Section

TOKENS, LENGTHS, COUNTS, DIGESTS = "tokens.bin", "lengths.i32", "counts.i32", "digests.bin"
REJECTS = "rejects.jsonl"
FILES = (TOKENS, LENGTHS, COUNTS, DIGESTS, REJECTS)
INDEX, MANIFEST = "index.idx", "manifest.json"
# Number of documents and rejects from which on each commit checks the share of rejects. Among fewer
# records, a single reject is already a large share.
_EARLY_CHECK = 1000


@dataclasses.dataclass
class Counts:
    """Running totals of a preparation.

    ``documents`` and ``tokens`` exclude duplicates; ``text_bytes`` (UTF-8) includes them.
    ``tokens`` includes end-of-document tokens. ``rejected`` and ``empty`` count input records.
    """

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    rejected: int = 0
    empty: int = 0
    duplicates: int = 0

    def add(self, batch: EncodedBatch, duplicates: int) -> None:
        """Add the counts of a batch."""
        self.documents += len(batch.counts)
        self.tokens += len(batch.tokens)
        self.text_bytes += batch.text_bytes
        self.rejected += len(batch.rejects)
        self.empty += batch.empty
        self.duplicates += duplicates


class Identity(Section):
    """Inputs and settings of a preparation; they must be unchanged to resume it.

    ``files`` has the path, the number of bytes to read and the modification time (ns) of each file.
    ``part`` is None if the whole corpus is prepared.
    """

    settings: dict[str, str | bool | int | None]
    files: tuple[tuple[str, int, int], ...]
    part: PartRecord | None = None


class State(Section):
    """Progress of a preparation, which each commit of the journal records.

    ``first_reject`` describes the first unusable record ("": none). ``finished`` means that all
    files are complete and can be renamed.
    """

    identity: Identity
    position: Position = Position()
    counts: Counts = Counts()
    first_reject: str = ""
    finished: bool = False


class Preparation:
    """Preparation in progress.

    Args:
        prefix: path of the finished files without their endings.
        state: state of the journal's last commit; for a new journal, the initial state.
    """

    def __init__(
        self,
        prefix: Path,
        files: list[CorpusFile],
        settings: PrepareSettings,
        state: State,
        journal: Journal,
    ) -> None:
        self.prefix, self.files, self.settings = prefix, files, settings
        self.identity, self.position = state.identity, state.position
        self.counts = dataclasses.replace(state.counts)
        self.first_reject = state.first_reject
        self.journal = journal
        self.deduplicator = (
            Deduplicator((journal.folder / DIGESTS).read_bytes()) if settings.deduplicate else None
        )

    def encode(self, workers: int, commit_seconds: float, progress: PrepareProgress) -> None:
        """Tokenise the rest of the corpus; commit every ``commit_seconds`` and at the end."""
        progress.update(self.position, self.counts)
        committed = time.monotonic()
        for position, batch in encode_in_order(self.files, self.position, self.settings, workers):
            self._append(batch)
            self.position = position
            progress.update(position, self.counts)
            if time.monotonic() - committed >= commit_seconds:
                self._commit(finished=False)
                if self.counts.documents + self.counts.rejected >= _EARLY_CHECK:
                    self._check_rejects()
                committed = time.monotonic()
        self._commit(finished=False)
        self._check_rejects()

    def _append(self, batch: EncodedBatch) -> None:
        duplicates = self.deduplicator.drop_duplicates(batch) if self.deduplicator else 0
        self.journal.append(TOKENS, batch.tokens.data)
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
            State(
                identity=self.identity,
                position=self.position,
                counts=self.counts,
                first_reject=self.first_reject,
                finished=finished,
            )
        )

    def _check_rejects(self) -> None:
        limit = self.settings.max_reject_share
        bad, seen = self.counts.rejected, self.counts.documents + self.counts.rejected
        if bad > limit * seen:
            restart = " with --restart" if self.counts.documents else ""
            raise UserError(
                f"{bad} of {seen} records cannot be used, more than the share --max-reject-share "
                f"{limit:g}; the first is {self.first_reject}{self._columns()}; all are in "
                f"{format_path(self.journal.folder / REJECTS)}; name the right fields "
                f"({self._field_options()}){restart}, or allow more and resume"
            )

    def _field_options(self) -> str:
        options = {
            "text": "--text-field",
            "instruction": "--prompt-field, --response-field",
            "chat": "--messages-field",
            "template": "--messages-field",
        }
        return options[self.settings.layout]

    def _columns(self) -> str:
        """Return the column names of the Parquet file with the first reject, for the error message.

        The result is "" if the file is not Parquet, is unreadable or has all required columns.
        """
        required = set(self.settings.required_fields)
        for file in self.files:
            if file.format == "parquet" and self.first_reject.startswith(
                f"{printable(file.path)} line"
            ):
                with suppress(UserError, OSError, pyarrow.ArrowException):
                    with open_file(file.path) as stream:
                        names = pyarrow.parquet.read_schema(stream).names
                    listed = shorten(", ".join(names))
                    return "" if required <= set(names) else f", its columns: {listed}"
        return ""

    def finish(self) -> None:
        """Write the index and the manifest, and commit the journal as finished."""
        if not self.counts.documents and self.identity.part is None:
            self._refuse_empty()
        folder = self.journal.folder
        index = folder / INDEX
        lengths, counts = _mapped(folder / LENGTHS), _mapped(folder / COUNTS)
        write_index(index, lengths, counts, token_dtype(self.settings.tokenizer))
        content = self._manifest(index, lengths, counts).sealed().to_json()
        write_durably(folder / MANIFEST, content.encode())
        self._commit(finished=True)

    def _refuse_empty(self) -> None:
        remove_journal(self.journal.folder)
        names = ", ".join(format_path(file.path) for file in self.files[:3])
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
            settings=self.identity.settings,
            **dataclasses.asdict(self.counts),
            lengths=length_histogram(document_lengths(lengths, counts)),
            inputs=tuple(map(_input_record, self.files)),
            part=self.identity.part,
            outputs=(
                FileRecord(
                    path=printable(f"{self.prefix.name}.bin"),
                    bytes=self.counts.tokens * token_dtype(self.settings.tokenizer).itemsize,
                    sha256=self.journal.sha256(TOKENS),
                ),
                FileRecord(
                    path=printable(f"{self.prefix.name}.idx"),
                    bytes=index.stat().st_size,
                    sha256=hash_file(index),
                ),
            ),
        )


def _mapped(path: Path) -> np.ndarray:
    empty = not path.stat().st_size
    return np.empty(0, np.int32) if empty else np.memmap(path, dtype=np.int32, mode="r")


def _input_record(file: CorpusFile) -> InputRecord:
    sha256 = hash_file(file.path, file.before, file.after)
    file.check_unchanged()
    return InputRecord(
        path=printable(file.path),
        bytes=file.size,
        sha256=sha256,
        before=file.before,
        after=file.after,
    )
