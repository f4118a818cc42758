"""``diffmegatron prepare``: a corpus becomes ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.json``.

Work in progress lies in the folder ``PREFIX.partial`` (a :class:`Journal`); the three files appear
under their names only when they are complete, the manifest last. A run that was killed at any
moment goes on from its last commit, and its files are byte for byte those of a run that was not.
"""

import dataclasses
import os
from pathlib import Path

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
from diffmegatron.data.prepare.encode import EncodeSettings, loaded, template
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
from diffmegatron.data.prepare.record_formats import Fields, Layout
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
    layout: Layout = "text",
    prompt_field: str = "prompt",
    response_field: str = "response",
    messages_field: str = "messages",
    id_field: str | None = None,
    deduplicate: bool = False,
    max_document_bytes: int = 1 << 26,
    max_reject_share: float = 0.05,
    part: Part | None = None,
    restart: bool = False,
    commit_seconds: float = 10.0,
    show_progress: bool = True,
) -> Manifest:
    """Tokenise a corpus into Megatron's IndexedDataset files and a manifest.

    A prefix that these inputs and settings have filled before is verified and left as it is. One
    process at a time is at a prefix: ``PREFIX.lock`` is held meanwhile.

    Args:
        inputs: JSONL (plain, .gz, .zst), Parquet, plain-text files, or folders of them; a
            plain-text file is one document.
        output_prefix: the three files are this plus ``.bin``, ``.idx`` and ``.json``; documents
            that could not be used are listed in ``.rejects.jsonl``.
        tokenizer: see :func:`diffmegatron.data.tokenizers.load_tokenizer`.
        text_field: key of a JSON line, or column of a Parquet file, that holds the text.
        workers: processes that tokenise; 1 does it in this one.
        pattern: which files of a folder count, such as ``*.py``.
        layout: ``text``, or for fine-tuning ``instruction``, ``chat`` or ``template`` (see
            :class:`diffmegatron.data.prepare.record_formats.Fields`, also for the next three).
        prompt_field: of ``instruction``; not learned.
        response_field: of ``instruction``; learned.
        messages_field: of ``chat`` and ``template``; what the assistant says is learned.
        id_field: names a document in the rejects file, beside its file and line.
        deduplicate: drop a document whose token ids equal an earlier one's.
        max_document_bytes: a longer document is rejected.
        max_reject_share: the share of unusable documents above which the corpus is refused.
        part: do only this part of the inputs, at ``PREFIX.parts/``; see
            :func:`diffmegatron.data.prepare.merge_parts.merge`. Shares of rejects and duplicates
            are then those within the part.
        restart: drop what is at this prefix and cannot be used: unfinished work that is damaged or
            of other inputs or settings, finished files that are damaged.
        commit_seconds: how much work a kill may cost.
        show_progress: a progress line on standard error.

    Raises:
        UserError: an input cannot be read to its end or is changed meanwhile, the prefix cannot
            be written, no document is usable, too many are not, the prefix holds something else
            or something damaged, another process is at it, or the part is not like those that are
            there.
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
    if layout == "chat" and loaded(tokenizer).has_chat_tokens:
        recorded["chat_tokens"] = True
    if layout == "template":
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
        if part is not None:  # or one that ends at once could remove it before another's lock
            output_prefix.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(Path(f"{output_prefix}.lock"), place, "give another --output"):
            finished = _finished(output_prefix, files, identity, restart=restart)
            if finished is not None:
                return finished
            state, journal = _unfinished(_partial(output_prefix), identity, restart=restart)
            with journal:
                if not state.finished:
                    run = Preparation(output_prefix, files, settings, state, journal)
                    with PrepareProgress(files, show_progress) as progress:
                        run.encode(
                            workers, max_document_bytes, max_reject_share, commit_seconds, progress
                        )
                        run.finish()
            _publish(output_prefix)
            # What a killed run had finished may have been damaged since.
            return _verified(output_prefix) if state.finished else read_manifest(output_prefix)
    except OSError as error:
        raise UserError(
            f"cannot write {shown(Path(error.filename or output_prefix))}: {reason(error)}; correct"
            " that and run the same command again, it goes on where it was"
        ) from None


def _check_prefix(prefix: Path) -> None:
    """What a prefix is, said to whoever gives a folder or one of the files."""
    name = shown(prefix)
    if os.path.lexists(prefix) and prefix.is_dir():
        raise UserError(f"--output {name} is a folder; give a name in it, such as {name}/corpus")
    if prefix.suffix in (".bin", ".idx", ".json", ".parts"):
        raise UserError(
            f"--output {name} becomes {name}.bin and more; give {shown(prefix.with_suffix(''))}"
        )


def _finished(
    prefix: Path, files: list[CorpusFile], identity: Identity, *, restart: bool
) -> Manifest | None:
    """The manifest at ``prefix``, verified; None where there is none, or it is dropped."""
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
            f"{shown(path)} is of {len(manifest.parts)} parts that were merged, which "
            "'diffmegatron data merge' verifies; choose another --output or delete it"
        )
    others = other_settings(manifest.settings, identity.settings)
    others += _other_input(manifest.inputs, files)
    if not others and manifest.part != identity.part:
        others.append("other input files beside these")
    if others:
        raise UserError(
            f"{shown(path)} was prepared with {', '.join(others)}; choose another --output or "
            "delete it"
        )


def _other_input(before: tuple[InputRecord, ...], now: list[CorpusFile]) -> list[str]:
    """What is said of the first input that is another, or of their number."""
    for record, file in zip(before, now, strict=False):
        name = shown(file.path)
        if record.path != printable(file.path):
            return [f"input {clipped(record.path)} in place of {name}"]
        if (record.before, record.bytes) != (file.before, file.size):
            return [f"{record.bytes} bytes of {name}, which are {file.size} now"]
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
    """The last commit of this very preparation, or its beginning; and its files."""
    try:
        commit = last_commit(folder, State)
        state = commit.state if commit else State(identity=identity)
        if state.identity == identity:
            return state, Journal(folder, () if state.finished else FILES, commit)
        # Of work without a document, such as with a field that no record has, nothing is lost.
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
