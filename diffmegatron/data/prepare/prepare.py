"""``diffmegatron prepare``: write a corpus as ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``.

Work in progress is in the folder ``PREFIX.partial`` (a :class:`Journal`). The three files are
renamed to their places when they are complete, the manifest last. A run that was killed resumes
from its last commit, and writes the same bytes as a run that was not.
"""

import os
from pathlib import Path
from typing import Any

from diffmegatron.data.index.corpus_manifest import (
    InputRecord,
    Manifest,
    hash_file,
    manifest_path,
    other_settings,
    read_manifest,
)
from diffmegatron.data.index.verify_corpus import check_hashes
from diffmegatron.data.prepare.corpus_readers import CorpusFile, find_files
from diffmegatron.data.prepare.encode import loaded, template
from diffmegatron.data.prepare.journal import Journal, last_commit, remove_journal
from diffmegatron.data.prepare.parts import Part, check_fits, cut
from diffmegatron.data.prepare.preparation import (
    FILES,
    INDEX,
    MANIFEST,
    REJECTS,
    TOKENS,
    Identity,
    Preparation,
    State,
)
from diffmegatron.data.prepare.prepare_progress import PrepareProgress
from diffmegatron.data.prepare.prepare_settings import PrepareSettings
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import clipped, printable, reason, shown, sync_folder

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
) -> Manifest:
    """Tokenise a corpus into Megatron's IndexedDataset files and a manifest.

    A prefix that already holds the result of these inputs and settings is only verified. The lock
    ``PREFIX.lock`` admits one process at a time.

    Args:
        inputs: JSONL (plain, .gz, .zst), Parquet, plain-text files, or folders of them; a
            plain-text file is one document.
        output_prefix: path of the three files without ``.bin``, ``.idx`` and ``.json``; documents
            that cannot be used are listed in ``.rejects.jsonl``.
        tokenizer: see :func:`diffmegatron.data.tokenizers.load_tokenizer`.
        text_field: key of a JSON line, or column of a Parquet file, with the text.
        workers: number of processes that tokenise; 1 uses this process.
        pattern: glob of the files to read of a folder, such as ``*.py``.
        part: prepare only this part of the inputs, in ``PREFIX.parts/``, for
            :func:`diffmegatron.data.prepare.merge_parts.merge`. Rejects and duplicates are then
            counted within the part.
        restart: drop unusable results at this prefix: unfinished work that is damaged or has other
            inputs or settings, and damaged finished files.
        commit_seconds: time between commits, which is the most work that a kill can lose.
        show_progress: whether to show a progress line on standard error.
        settings: other fields of :class:`PrepareSettings`.

    Raises:
        UserError: an input cannot be read or changes meanwhile, the prefix cannot be written or
            holds other or damaged files, no document or too few are usable, another process has the
            lock, or the part does not match the parts that exist.
    """
    _check_prefix(output_prefix)
    chosen = PrepareSettings(tokenizer=tokenizer, text_field=text_field, **settings)
    recorded = {"tokenizer_sha256": loaded(tokenizer).sha256, **chosen.recorded()}
    if chosen.layout == "chat" and loaded(tokenizer).has_chat_tokens:
        recorded["chat_tokens"] = True
    if chosen.layout == "template":
        recorded["chat_template_sha256"] = template(tokenizer).sha256
    files, place = find_files(inputs, pattern), f"--output {output_prefix}"
    record = None
    if part is not None:
        files, record = cut(files, part)
        check_fits(output_prefix, part, record, recorded)
        output_prefix, place = part.prefix(output_prefix), f"{place} --part {part}"
    identity = Identity(
        settings=recorded,
        files=tuple((printable(f.path), f.size, f.fingerprint.modified) for f in files),
        part=record,
    )
    try:
        if part is not None:  # The lock of a part must not create and remove the shared folder.
            output_prefix.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(Path(f"{output_prefix}.lock"), place, "give another --output"):
            finished = _finished(output_prefix, files, identity, restart=restart)
            if finished is not None:
                return finished
            state, journal = _unfinished(_partial(output_prefix), identity, restart=restart)
            with journal:
                if not state.finished:
                    run = Preparation(output_prefix, files, chosen, state, journal)
                    with PrepareProgress(files, show_progress) as progress:
                        run.encode(workers, commit_seconds, progress)
                        run.finish()
            _publish(output_prefix)
            # Files that a killed run had finished may have been damaged since.
            return _verified(output_prefix) if state.finished else read_manifest(output_prefix)
    except OSError as error:
        raise UserError(
            f"cannot write {shown(Path(error.filename or output_prefix))}: {reason(error)}; correct"
            " that and run the same command again to resume"
        ) from None


def _check_prefix(prefix: Path) -> None:
    """Refuse a folder or an output file given as the prefix."""
    name = shown(prefix)
    if os.path.lexists(prefix) and prefix.is_dir():
        raise UserError(f"--output {name} is a folder; give a name in it, such as {name}/corpus")
    if prefix.suffix in (".bin", ".idx", ".json", ".parts"):
        raise UserError(
            f"--output {name} has the ending of an output file; give "
            f"{shown(prefix.with_suffix(''))}"
        )


def _finished(
    prefix: Path, files: list[CorpusFile], identity: Identity, *, restart: bool
) -> Manifest | None:
    """Return the verified manifest at ``prefix``; None if there is none or it was dropped."""
    path = manifest_path(prefix)
    if not os.path.lexists(path) or os.path.lexists(_partial(prefix)):
        return None
    try:
        manifest = read_manifest(prefix)
    except UserError as damage:
        if not restart:
            raise UserError(f"{damage}{_REMEDY}") from None
    else:
        _check_same(manifest, path, files, identity)
        try:
            return _verified(prefix)
        except UserError:
            if not restart:
                raise
    path.unlink()
    return None


def _check_same(
    manifest: Manifest, path: Path, files: list[CorpusFile], identity: Identity
) -> None:
    if manifest.parts:
        raise UserError(
            f"{shown(path)} was merged from {len(manifest.parts)} parts; verify it with "
            "'diffmegatron data merge', choose another --output or delete it"
        )
    others = other_settings(manifest.settings, identity.settings)
    others += _other_input(manifest.inputs, files)
    if not others and manifest.part != identity.part:
        others.append("other input files")
    if others:
        raise UserError(
            f"{shown(path)} was prepared with {', '.join(others)}; choose another --output or "
            "delete it"
        )


def _other_input(before: tuple[InputRecord, ...], now: list[CorpusFile]) -> list[str]:
    """Describe the first input that differs, or the number of inputs if only that differs."""
    for record, file in zip(before, now, strict=False):
        name = shown(file.path)
        if record.path != printable(file.path):
            return [f"input {clipped(record.path)} instead of {name}"]
        if (record.before, record.bytes) != (file.before, file.size):
            return [f"{record.bytes} bytes of {name}, which has {file.size}"]
        if hash_file(file.path, file.before, file.after) != record.sha256:
            return [f"another content of {name}"]
    if len(before) == len(now):
        return []
    return [f"{len(before)} input file{'s' if len(before) > 1 else ''}, not {len(now)}"]


def _verified(prefix: Path) -> Manifest:
    try:
        return check_hashes(prefix)
    except UserError as damage:
        raise UserError(f"{damage}{_REMEDY}") from None


def _unfinished(folder: Path, identity: Identity, *, restart: bool) -> tuple[State, Journal]:
    """Open the journal at the last commit of this preparation, or at its beginning."""
    try:
        commit = last_commit(folder, State)
        state = commit.state if commit else State(identity=identity)
        if state.identity == identity:
            return state, Journal(folder, () if state.finished else FILES, commit)
        # A journal without documents, for instance after a wrong field name, loses nothing.
        is_lost = bool(state.counts.documents)
        problem = _another(folder, state.identity, identity)
    except UserError as error:
        is_lost, problem = True, str(error)
    if is_lost and not restart:
        raise UserError(f"{problem}, or add --restart to drop it and begin this one")
    remove_journal(folder)
    return State(identity=identity), Journal(folder, FILES, None)


def _another(folder: Path, before: Identity, now: Identity) -> str:
    others = other_settings(before.settings, now.settings)
    if (before.files, before.part) != (now.files, now.part):
        others.append("other input files")
    return (
        f"{shown(folder)} holds an unfinished preparation with {', '.join(others)}; finish that "
        "one with its own command"
    )


def _publish(prefix: Path) -> None:
    """Rename finished files to their places; each step may be repeated after a kill."""
    folder = _partial(prefix)
    targets = {TOKENS: ".bin", INDEX: ".idx", MANIFEST: ".json"}
    if (folder / REJECTS).exists() and (folder / REJECTS).stat().st_size:
        targets = {REJECTS: ".rejects.jsonl", **targets}
    for name, suffix in targets.items():
        if (folder / name).exists():
            (folder / name).replace(f"{prefix}{suffix}")
            sync_folder(prefix.parent)
    remove_journal(folder)


def _partial(prefix: Path) -> Path:
    return Path(f"{prefix}.partial")
