"""``diffmegatron prepare``: write a corpus as ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``.

Unfinished work is in the folder ``PREFIX.partial``. A preparation that was killed resumes from its
last commit. At the end, the files are renamed to their final names, the manifest last.
"""

import os
from pathlib import Path
from typing import Any

from diffmegatron.data.index.corpus_manifest import (
    CorpusManifest,
    InputRecord,
    check_hashes,
    hash_file,
    manifest_path,
    other_settings,
    read_corpus_manifest,
)
from diffmegatron.data.prepare.corpus_readers import CorpusFile, find_files
from diffmegatron.data.prepare.encode import loaded, template
from diffmegatron.data.prepare.journal import (
    Journal,
    JournalState,
    PreparationIdentity,
    last_commit,
    remove_journal,
)
from diffmegatron.data.prepare.parts import Part, check_fits, cut
from diffmegatron.data.prepare.preparation import FILES, Preparation, publish
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import format_path, os_error_text, printable, shorten

_REMEDY = " (--restart prepares it again)"


def prepare(
    inputs: list[Path],
    output_prefix: Path,
    tokenizer: str,
    text_field: str = "text",
    *,
    workers: int = 1,
    pattern: str = "*",
    part: Part | None = None,
    restart: bool = False,
    commit_seconds: float = 10.0,
    show_progress: bool = True,
    **settings: Any,
) -> CorpusManifest:
    """Call :func:`prepare_corpus` from Python, with the settings as separate arguments.

    Args:
        tokenizer: name or path, see :func:`diffmegatron.data.tokenizers.load_tokenizer`.
        text_field: JSON key or Parquet column of the text.
        settings: other fields of :class:`PrepareSettings`.
    """
    return prepare_corpus(
        inputs,
        output_prefix,
        PrepareSettings(tokenizer, text_field=text_field, **settings),
        workers=workers,
        pattern=pattern,
        part=part,
        restart=restart,
        commit_seconds=commit_seconds,
        show_progress=show_progress,
    )


def prepare_corpus(
    inputs: list[Path],
    output_prefix: Path,
    settings: PrepareSettings,
    *,
    workers: int = 1,
    pattern: str = "*",
    part: Part | None = None,
    restart: bool = False,
    commit_seconds: float = 10.0,
    show_progress: bool = True,
) -> CorpusManifest:
    """Tokenise a corpus into Megatron's IndexedDataset files and a manifest.

    If finished files of the same inputs and settings exist, they are only verified. The lock
    ``PREFIX.lock`` ensures that one process at a time works on a prefix.

    Args:
        inputs: JSONL, Parquet or plain-text files, or folders of them. JSONL and plain text can be
            compressed (.gz, .zst). A plain-text file is one document.
        output_prefix: path of the output files without ``.bin``, ``.idx`` and ``.json``. Unusable
            records are listed in ``PREFIX.rejects.jsonl``.
        settings: settings of the corpus: tokenizer, layout, fields and limits.
        workers: number of processes that tokenise; 1 uses this process.
        pattern: glob of the files to read in a folder, such as ``*.py``.
        part: part to prepare in ``PREFIX.parts/``; None: all inputs. Duplicates are found only
            within a part.
        restart: whether to replace damaged files, and unfinished work of other inputs or settings.
        commit_seconds: seconds between two commits; a kill loses the work since the last commit.

    Raises:
        UserError: an input, a setting or an existing file cannot be used.
    """
    _check_prefix(output_prefix)
    tokenizer = loaded(settings.tokenizer)
    recorded = {"tokenizer_sha256": tokenizer.sha256, **settings.recorded()}
    if settings.layout == "chat" and tokenizer.has_chat_tokens:
        recorded["chat_tokens"] = True
    if settings.layout == "template":
        recorded["chat_template_sha256"] = template(settings.tokenizer).sha256
    files, place = find_files(inputs, pattern), f"--output {output_prefix}"
    record = None
    if part is not None:
        files, record = cut(files, part)
        check_fits(output_prefix, part, record, recorded)
        output_prefix, place = part.prefix(output_prefix), f"{place} --part {part}"
    identity = PreparationIdentity(
        settings=recorded,
        files=tuple((printable(f.path), f.size, f.fingerprint.modified) for f in files),
        part=record,
    )
    try:
        if part is not None:
            # If FileLock created this folder, it would remove the empty folder on exit, even if
            # another process is about to write its part there.
            output_prefix.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(Path(f"{output_prefix}.lock"), place, "give another --output"):
            finished = _finished(output_prefix, files, identity, restart=restart)
            if finished is not None:
                return finished
            folder = _partial(output_prefix)
            state, journal = _unfinished(folder, identity, restart=restart)
            was_finished = state.finished
            with journal:
                if not was_finished:
                    preparation = Preparation(output_prefix, files, settings, state, journal)
                    preparation.run(workers, commit_seconds, show_progress)
            publish(folder, output_prefix)
            if not was_finished:
                return read_corpus_manifest(output_prefix)
            # Files that an earlier, killed process finished may have been damaged since then.
            try:
                return check_hashes(output_prefix)
            except UserError as damage:
                raise UserError(f"{damage}{_REMEDY}") from None
    except OSError as error:
        raise UserError(
            f"cannot write {format_path(Path(error.filename or output_prefix))}: "
            f"{os_error_text(error)}; correct that and run the same command again to resume"
        ) from None


def _check_prefix(prefix: Path) -> None:
    name = format_path(prefix)
    if os.path.lexists(prefix) and prefix.is_dir():
        raise UserError(f"--output {name} is a folder; give a name in it, such as {name}/corpus")
    if prefix.suffix in (".bin", ".idx", ".json", ".parts"):
        raise UserError(
            f"--output {name} has the ending of an output file; give "
            f"{format_path(prefix.with_suffix(''))}"
        )


def _finished(
    prefix: Path, files: list[CorpusFile], identity: PreparationIdentity, *, restart: bool
) -> CorpusManifest | None:
    """Verify a finished corpus and return its manifest; None if it must be prepared (again)."""
    path = manifest_path(prefix)
    if not os.path.lexists(path) or os.path.lexists(_partial(prefix)):
        return None
    try:
        manifest = read_corpus_manifest(prefix)
    except UserError as damage:
        problem = damage
    else:
        _check_same(manifest, path, files, identity)
        try:
            return check_hashes(prefix)
        except UserError as damage:
            problem = damage
    if not restart:
        raise UserError(f"{problem}{_REMEDY}")
    path.unlink()
    return None


def _check_same(
    manifest: CorpusManifest, path: Path, files: list[CorpusFile], identity: PreparationIdentity
) -> None:
    if manifest.parts:
        raise UserError(
            f"{format_path(path)} was merged from {len(manifest.parts)} parts; verify it with "
            "'diffmegatron data merge', choose another --output or delete it"
        )
    others = other_settings(manifest.settings, identity.settings)
    others += _describe_changed_input(manifest.inputs, files)
    if not others and manifest.part != identity.part:
        others.append("other input files")
    if others:
        raise UserError(
            f"{format_path(path)} was prepared with {', '.join(others)}; choose another --output "
            "or delete it"
        )


def _describe_changed_input(before: tuple[InputRecord, ...], now: list[CorpusFile]) -> list[str]:
    for record, file in zip(before, now, strict=False):
        name = format_path(file.path)
        if record.path != printable(file.path):
            return [f"input {shorten(record.path)} instead of {name}"]
        if (record.before, record.bytes) != (file.before, file.size):
            return [f"{record.bytes} bytes of {name}, which has {file.size}"]
        if hash_file(file.path, file.before, file.after) != record.sha256:
            return [f"another content of {name}"]
    if len(before) == len(now):
        return []
    return [f"{len(before)} input file{'s' if len(before) > 1 else ''} instead of {len(now)}"]


def _unfinished(
    folder: Path, identity: PreparationIdentity, *, restart: bool
) -> tuple[JournalState, Journal]:
    """Open the journal in ``folder`` at its last commit, or begin a new journal."""
    try:
        commit = last_commit(folder)
        state = commit.state if commit else JournalState(identity=identity)
        if state.identity == identity:
            return state, Journal(folder, () if state.finished else FILES, commit)
        # If no document was committed (for instance with a wrong --text-field), no work is lost.
        is_lost = bool(state.counts.documents)
        others = other_settings(state.identity.settings, identity.settings)
        if (state.identity.files, state.identity.part) != (identity.files, identity.part):
            others.append("other input files")
        problem = (
            f"{format_path(folder)} holds an unfinished preparation with {', '.join(others)}; "
            "finish that one with its own command"
        )
    except UserError as error:
        is_lost, problem = True, str(error)
    if is_lost and not restart:
        raise UserError(f"{problem}, or add --restart to drop it and begin this one")
    remove_journal(folder)
    return JournalState(identity=identity), Journal(folder, FILES, None)


def _partial(prefix: Path) -> Path:
    return Path(f"{prefix}.partial")
