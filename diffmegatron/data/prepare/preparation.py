"""Encode a corpus, or the rest of it after an interruption, and write the finished files."""

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from diffmegatron.data.index.corpus_manifest import (
    CorpusManifest,
    FileRecord,
    InputRecord,
    LengthBin,
    TokenizerRecord,
    document_lengths,
    file_record,
    hash_file,
    length_histogram,
)
from diffmegatron.data.index.index_file import write_index
from diffmegatron.data.prepare.corpus_readers import CorpusFile
from diffmegatron.data.prepare.encode import Deduplicator, EncodedBatch, loaded, token_dtype
from diffmegatron.data.prepare.journal import Journal, JournalState, remove_journal
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.data.prepare.worker_pool import encode_in_order
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, open_file, printable, shorten, sync_path, write_durably

TOKENS, LENGTHS, COUNTS, DIGESTS = "tokens.bin", "lengths.i32", "counts.i32", "digests.bin"
REJECTS = "rejects.jsonl"
FILES = (TOKENS, LENGTHS, COUNTS, DIGESTS, REJECTS)
INDEX, MANIFEST = "index.idx", "manifest.json"
# From this number of documents and rejects on, every commit also checks the share of rejects.
# Among fewer records, a few rejects would be a large share.
_EARLY_CHECK = 1000


@dataclasses.dataclass
class Preparation:
    """Preparation of a corpus, from its beginning or from the last commit on."""

    prefix: Path  # path of the finished files, without their suffixes
    files: list[CorpusFile]
    settings: PrepareSettings
    state: JournalState  # empty, or the state of the last commit; updated by run()
    journal: Journal

    @cached_property
    def deduplicator(self) -> Deduplicator | None:
        """Filter of duplicates; None if duplicates are kept."""
        if not self.settings.deduplicate:
            return None
        return Deduplicator((self.journal.folder / DIGESTS).read_bytes())

    def run(self, workers: int, commit_seconds: float, show_progress: bool) -> None:
        """Tokenise the rest of the corpus with regular commits; write the index and manifest."""
        state, committed = self.state, time.monotonic()
        with _progress(self.files, state, show_progress) as show:
            batches = encode_in_order(self.files, state.position, self.settings, workers)
            for state.position, batch in batches:
                self._append(batch)
                show()
                if time.monotonic() - committed >= commit_seconds:
                    self.journal.commit(state)
                    if state.counts.documents + state.counts.rejected >= _EARLY_CHECK:
                        self._check_rejects()
                    committed = time.monotonic()
            self.journal.commit(state)
            self._check_rejects()
            self._finish()

    def _append(self, batch: EncodedBatch) -> None:
        counts, journal = self.state.counts, self.journal
        if self.deduplicator:
            counts.duplicates += self.deduplicator.drop_duplicates(batch)
            journal.append(DIGESTS, b"".join(batch.digests))
        journal.append(TOKENS, batch.tokens.data)
        journal.append(LENGTHS, batch.lengths.data)
        journal.append(COUNTS, batch.counts.data)
        for reject in batch.rejects:
            self.state.first_reject = self.state.first_reject or str(reject)
            journal.append(REJECTS, json.dumps(reject._asdict()).encode() + b"\n")
        counts.documents += len(batch.counts)
        counts.tokens += len(batch.tokens)
        counts.text_bytes += batch.text_bytes
        counts.rejected += len(batch.rejects)
        counts.empty += batch.empty

    def _check_rejects(self) -> None:
        counts, limit = self.state.counts, self.settings.max_reject_share
        seen = counts.documents + counts.rejected
        if counts.rejected > limit * seen:
            names = self.settings.field_settings
            options = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            restart = " with --restart" if counts.documents else ""
            raise UserError(
                f"{counts.rejected} of {seen} records cannot be used, more than the share "
                f"--max-reject-share {limit:g}; the first is {self.state.first_reject}"
                f"{self._columns()}; all are in {format_path(self.journal.folder / REJECTS)}; "
                f"name the right fields ({options}){restart}, or allow more and resume"
            )

    def _columns(self) -> str:
        """List the columns of the first reject's Parquet file, for an error message.

        Return "" if the file is not Parquet, has all required columns or cannot be read.
        """
        required = set(self.settings.required_fields)
        for file in self.files:
            if file.format == "parquet" and self.state.first_reject.startswith(
                f"{printable(file.path)} line"
            ):
                with suppress(UserError, OSError, pyarrow.ArrowException):
                    with open_file(file.path) as stream:
                        names = pyarrow.parquet.read_schema(stream).names
                    listed = shorten(", ".join(names))
                    return "" if required <= set(names) else f", its columns: {listed}"
        return ""

    def _finish(self) -> None:
        state, folder = self.state, self.journal.folder
        if not state.counts.documents and state.identity.part is None:
            remove_journal(folder)
            names = ", ".join(format_path(file.path) for file in self.files[:3])
            raise UserError(
                f"the corpus holds no document with text ({len(self.files)} files: {names}"
                f"{', ...' if len(self.files) > 3 else ''}); check the input and its layout"
            )
        index = folder / INDEX
        lengths, counts = _mapped(folder / LENGTHS), _mapped(folder / COUNTS)
        write_index(index, lengths, counts, token_dtype(self.settings.tokenizer))
        histogram = length_histogram(document_lengths(lengths, counts))
        manifest = self._manifest(index, histogram).sealed()
        write_durably(folder / MANIFEST, manifest.to_json().encode())
        state.finished = True
        self.journal.commit(state)

    def _manifest(self, index: Path, histogram: tuple[LengthBin, ...]) -> CorpusManifest:
        tokenizer, counts = loaded(self.settings.tokenizer), self.state.counts
        return CorpusManifest(
            tokenizer=TokenizerRecord.model_validate(tokenizer, from_attributes=True),
            settings=self.state.identity.settings,
            **dataclasses.asdict(counts),
            lengths=histogram,
            inputs=tuple(map(_input_record, self.files)),
            part=self.state.identity.part,
            outputs=(
                FileRecord(
                    path=printable(f"{self.prefix.name}.bin"),
                    bytes=counts.tokens * token_dtype(self.settings.tokenizer).itemsize,
                    sha256=self.journal.sha256(TOKENS),
                ),
                file_record(index, f"{self.prefix.name}.idx"),
            ),
        )


def publish(folder: Path, prefix: Path) -> None:
    """Rename the finished files and remove the journal; a killed call can be repeated."""
    targets = {TOKENS: ".bin", INDEX: ".idx", MANIFEST: ".json"}
    if (folder / REJECTS).exists() and (folder / REJECTS).stat().st_size:
        targets = {REJECTS: ".rejects.jsonl", **targets}
    for name, suffix in targets.items():
        if (folder / name).exists():
            (folder / name).replace(f"{prefix}{suffix}")
            sync_path(prefix.parent)
    remove_journal(folder)


@contextmanager
def _progress(
    files: list[CorpusFile], state: JournalState, show: bool
) -> Iterator[Callable[[], None]]:
    """Show a progress line with average rates since this call; yield the function to redraw it."""
    starts = list(itertools.accumulate((file.size for file in files), initial=0))
    counts, started = state.counts, time.monotonic()
    first_bytes, first_tokens = counts.text_bytes, counts.tokens
    line = Progress(
        TextColumn("prepare"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show,
    )
    task = line.add_task("prepare", total=max(1, starts[-1]), rate="")

    def redraw() -> None:
        seconds = max(1e-9, time.monotonic() - started)
        rate = (
            f"{(counts.text_bytes - first_bytes) / seconds / 1e6:.1f} MB/s  "
            f"{(counts.tokens - first_tokens) / seconds:,.0f} tokens/s  {counts.rejected} rejected"
        )
        completed = starts[state.position.file] + state.position.offset
        line.update(task, completed=completed, rate=rate)

    with line:
        redraw()
        yield redraw


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
