"""Faults that need no run under torchrun, each tried many times, for ``faults.py --long``.

A trial damages a fresh copy of valid files and reads them again. In most classes a fault counts as
survived if the reader returns the original content or raises a UserError of one sentence. For
faults that must be detected, only the error counts. The docstrings of the trials describe what must
happen in other cases.
"""

import gzip
import json
import math
import os
import random
import resource
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import zstandard

from diffmegatron.checkpoint.checkpoint_format import (
    RECIPE,
    STATE,
    Position,
    finish_checkpoint,
    open_checkpoint,
    rank_file,
)
from diffmegatron.checkpoint.checkpoint_manifest import (
    MANIFEST,
    CheckpointManifest,
    describe_file,
    write_manifest,
)
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.sharded import named_tensors, pieces_of, write_pieces
from diffmegatron.config.load import load_recipe
from diffmegatron.config.recovery_config import GuardConfig
from diffmegatron.data.index.corpus_manifest import check_hashes
from diffmegatron.data.index.token_store import open_corpus
from diffmegatron.data.prepare import preparation
from diffmegatron.data.prepare.corpus_readers import find_files, read_records
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.sampling.array_cache import cached_arrays
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.model.parameter_shards import Shard
from diffmegatron.optim.guard import Guard
from diffmegatron.training.monitoring.metrics import METRICS, MetricsWriter, read_metrics

STEP = 7
LINES = [json.dumps({"text": f"document {number} " * 9}) + "\n" for number in range(300)]
JSONL = "".join(LINES).encode()
WORDS = ("0", "-1", "2", "1e400", "nan", "null", "[]", "{a: 1}", "'", "&a [*a]", "9" * 6000)
LONGEST_SENTENCE = 1500

Trial = Callable[[Path, random.Random], bool]


class FaultClass(NamedTuple):
    """A class of faults.

    Attributes:
        name: name in the report.
        tried: number of trials.
        trial: function that runs one trial, and returns whether the fault was survived.
    """

    name: str
    tried: int
    trial: Trial


def run_trials(folder: Path, recipe: str, seed: int) -> dict[str, dict[str, object]]:
    """Try every class of faults.

    Args:
        folder: existing folder for the valid files and their copies.
        recipe: text of a recipe.
        seed: seed of the faults.

    Returns:
        For each class, the numbers of tried and of survived faults, and the first exception that a
        trial raised, if any. A trial should raise none, because it catches the errors that it
        expects from a reader.
    """
    good = folder / "good"
    make_good(good, recipe)
    report: dict[str, dict[str, object]] = {}
    for each in CLASSES:
        pick, survived, failure = random.Random(f"{seed} {each.name}"), 0, None
        for _ in range(each.tried):
            copy = folder / "copy"
            shutil.copytree(good, copy)
            try:
                survived += each.trial(copy, pick)
            except Exception as error:  # the fault was not survived
                failure = failure or repr(error)
            shutil.rmtree(copy)
        report[each.name] = {"tried": each.tried, "survived": survived}
        report[each.name] |= {"first_error": failure} if failure else {}
    return report


def make_good(folder: Path, recipe: str) -> None:
    """Write the valid files: a checkpoint of two ranks, a corpus, a cache and a recipe.

    It also writes the files of a preparation that was interrupted.
    """
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe)
    (folder / "in.jsonl").write_bytes(JSONL)
    run_prepare(folder)
    interrupted = mock.patch.object(preparation, "write_index", side_effect=KeyboardInterrupt)
    with interrupted, suppress(KeyboardInterrupt):
        run_prepare(folder, "work")
    open_cache(folder)
    store = CheckpointStore(folder / "run")
    directory, entries = store.begin(STEP), []
    for rank in range(2):
        shard = Shard("decoder.final_layernorm.weight", (32,), (16 * rank,), (16,), 0, True)
        values = {kind: torch.rand(16) + 0.1 for kind in ("weight", "exp_avg", "exp_avg_sq")}
        states = {"random.cpu": torch.full((16,), rank, dtype=torch.uint8)}
        described = named_tensors(pieces_of([shard], 0, values), states)
        entries.append(write_pieces(directory / rank_file(rank), *described))
    sources = [{"path": "corpus", "content": "corpus", "weight": 1.0}]
    mixture = [{"from_sample": 0, "sources": sources}]
    data = {"consumed_samples": 8 * STEP, "settings": {}, "mixture": mixture}
    position = Position(STEP, STEP, data, Guard(GuardConfig()).state())
    finish_checkpoint(store, position, load_recipe(folder / "recipe.yaml"), entries)


def run_prepare(folder: Path, name: str = "out", source: str = "in.jsonl") -> str:
    """Prepare an input, and return the hash of its tokens."""
    manifest = prepare([folder / source], folder / name, "bytes", show_progress=False)
    return manifest.content


def open_cache(folder: Path) -> list[int]:
    """Return the array of a cache, and build the cache if it is missing."""
    arrays, _ = cached_arrays(folder / "cache", ("key",), lambda: ({"ends": np.arange(500)}, {}))
    return [int(value) for value in arrays["ends"]]


def is_refused(read: Callable[[], object]) -> bool:
    """Return whether ``read()`` raises a UserError of one sentence; False if it returns."""
    try:
        read()
    except UserError as error:
        return "\n" not in str(error) and len(str(error)) < LONGEST_SENTENCE
    return False


def is_equal_or_refused(read: Callable[[], object], expected: object) -> bool:
    """Return whether ``read()`` returns ``expected`` or raises a UserError of one sentence."""
    found: list[object] = []
    return is_refused(lambda: found.append(read())) or found == [expected]


def flip(path: Path, pick: random.Random) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[pick.randrange(len(content))] ^= 1 << pick.randrange(8)
    path.write_bytes(content)


def cut(path: Path, pick: random.Random) -> None:
    """Cut a file at a random place."""
    os.truncate(path, pick.randrange(path.stat().st_size))


def become_fifo(path: Path) -> None:
    """Replace a file by a FIFO without a writer."""
    path.unlink()
    os.mkfifo(path)


# Checkpoints


def checkpoint(copy: Path) -> Path:
    """Return the directory of the only checkpoint."""
    return CheckpointStore(copy / "run").path(STEP)


def any_file(copy: Path, pick: random.Random) -> Path:
    """Return a random file of the checkpoint that is not its manifest."""
    return checkpoint(copy) / pick.choice([STATE, RECIPE, rank_file(0), rank_file(1)])


def contents(copy: Path) -> object:
    """Return the complete content of a checkpoint as text with every digit."""
    opened = open_checkpoint(checkpoint(copy))
    values = [
        opened.tensors.read_tensor(kind, name).tolist()
        for kind in ("weight", "exp_avg", "exp_avg_sq")
        for name in opened.tensors.names()
    ]
    return repr((opened.recipe, opened.state, values))


def refuses(damage: Callable[[Path, random.Random], None]) -> Trial:
    """Return a trial that damages a checkpoint; opening the checkpoint must raise a UserError."""

    def trial(copy: Path, pick: random.Random) -> bool:
        damage(copy, pick)
        return is_refused(lambda: contents(copy))

    return trial


def flipped_manifest(copy: Path, pick: random.Random) -> bool:
    """Flip a bit of the manifest; opening must give the original content or an error.

    Damage to white space does not change the content, and may go undetected.
    """
    expected = contents(copy)
    flip(checkpoint(copy) / MANIFEST, pick)
    return is_equal_or_refused(lambda: contents(copy), expected)


def add_foreign(copy: Path, pick: random.Random) -> None:
    """Add a file that the manifest does not list."""
    (checkpoint(copy) / f"rank_{pick.randrange(2, 9999):05d}.safetensors").write_bytes(b"")


def put_not_finite(copy: Path, pick: random.Random) -> None:
    """Write NaN or infinity into a rank's file, and update the manifest's checksum of the file.

    Only the check for finite numbers can detect the damage.
    """
    path = checkpoint(copy) / rank_file(pick.randrange(2))
    content = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(content[:8], "little") + 4 * pick.randrange(48)
    content[begin : begin + 4] = np.float32(pick.choice([math.nan, math.inf, -math.inf])).tobytes()
    path.write_bytes(content)
    sign(copy)


def overlap(copy: Path, pick: random.Random) -> None:
    """Change the offset of a rank's piece of a tensor, so that pieces overlap or leave a gap.

    The manifest is updated, so that only the check of the pieces can detect the damage.
    """
    path = checkpoint(copy) / rank_file(pick.randrange(2))
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    pieces = json.loads(header["__metadata__"]["pieces"])
    before = pieces[0]["offset"][0]
    pieces[0]["offset"] = [pick.choice([place for place in range(-8, 40) if place != before])]
    header["__metadata__"]["pieces"] = json.dumps(pieces)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    sign(copy)


def sign(copy: Path) -> None:
    """Write a new manifest that matches the damaged files of a checkpoint."""
    files = sorted(path for path in checkpoint(copy).iterdir() if path.name != MANIFEST)
    entries = tuple(describe_file(path) for path in files)
    write_manifest(checkpoint(copy), CheckpointManifest(STEP, entries))


# Inputs of prepare


def broken_archive(suffix: str, pack: Callable[[bytes], bytes]) -> Trial:
    """Return a trial that prepares an archive with a flipped bit or without its end.

    This must give the same tokens as the undamaged text, or an error.

    Args:
        suffix: file name suffix of the archive format.
        pack: function that compresses bytes.
    """

    def trial(copy: Path, pick: random.Random) -> bool:
        name = f"in.jsonl.{suffix}"
        (copy / name).write_bytes(pack(JSONL))
        pick.choice([flip, cut])(copy / name, pick)
        expected = check_hashes(copy / "out").content
        return is_equal_or_refused(lambda: run_prepare(copy, "new", name), expected)

    return trial


def changed_while_read(copy: Path, pick: random.Random) -> bool:
    """Change or remove a file after some of its documents were read.

    Reading the other documents must raise an error.
    """
    path = copy / "in.jsonl"
    (file,) = find_files([path], "*")
    records = read_records(file, ("text",), 1 << 20)
    for _ in range(pick.randrange(1, len(LINES))):
        next(records)
    pick.choice(
        [
            lambda: path.write_bytes(JSONL + b"{}\n"),
            lambda: os.truncate(path, 10),
            lambda: (path.rename(copy / "old"), shutil.copy(copy / "old", path)),
            path.unlink,
        ]
    )()
    return is_refused(lambda: list(records))


def odd_name(copy: Path, pick: random.Random) -> bool:
    """Prepare a file whose name has arbitrary bytes; the name must not change the tokens."""
    name = bytes(pick.choice([*range(1, 47), *range(48, 256)]) for _ in range(pick.randint(1, 60)))
    source = os.fsdecode(b"a" + name + b".jsonl")
    (copy / source).write_bytes(JSONL)
    return run_prepare(copy, "new", source) == check_hashes(copy / "out").content


def two_at_once(copy: Path, pick: random.Random) -> bool:
    """Prepare a corpus while its lock is held elsewhere, then again after the lock's release.

    The first attempt must raise an error. The second must give the right tokens.
    """
    with FileLock(copy / "new.lock", "the prefix", "wait"):
        refused = is_refused(lambda: run_prepare(copy, "new"))
    return refused and run_prepare(copy, "new") == check_hashes(copy / "out").content


def damaged_work(copy: Path, pick: random.Random) -> bool:
    """Damage an interrupted preparation and resume it.

    This must give the same tokens or an error, and ``--restart`` must repair the preparation.
    """
    path = pick.choice([path for path in (copy / "work.partial").iterdir() if path.stat().st_size])
    pick.choice([flip, cut])(path, pick)
    expected = check_hashes(copy / "out").content
    held = is_equal_or_refused(lambda: run_prepare(copy, "work"), expected)
    prepare([copy / "in.jsonl"], copy / "work", "bytes", restart=True, show_progress=False)
    return held and check_hashes(copy / "work").content == expected


def damaged_corpus(copy: Path, pick: random.Random) -> bool:
    """Damage the tokens or the index of a corpus.

    The hashes must detect the damage. Opening the corpus without the check of the hashes must give
    arrays or a UserError, but no other exception.
    """
    pick.choice([flip, cut])(copy / f"out{pick.choice(['.bin', '.idx'])}", pick)

    def read() -> None:
        opened = open_corpus(str(copy / "out"))
        opened.check_index()
        int(opened.tokens.sum())

    return is_equal_or_refused(read, None) and is_refused(lambda: check_hashes(copy / "out"))


def damaged_cache(copy: Path, pick: random.Random) -> bool:
    """Damage a file of the cache; the next reader must rebuild the cache."""
    path = pick.choice([path for path in copy.glob("cache/*/*") if path.is_file()])
    pick.choice([flip, cut, lambda path, _: become_fifo(path)])(path, pick)
    return open_cache(copy) == list(range(500))


# Recipes and records


def random_override(copy: Path, pick: random.Random) -> bool:
    """Load a recipe with a random override or a flipped bit; it must load or give a UserError."""
    path = copy / "recipe.yaml"
    keys = ["model.num_layers", "training.steps", "optimizer.lr", "parallel.tensor", "data.sources"]
    if pick.random() < 0.5:
        flip(path, pick)
        given = []
    else:
        given = [f"{pick.choice([*keys, 'model', 'no.such'])}={pick.choice(WORDS)}"]
    found: list[object] = []
    return is_refused(lambda: found.append(load_recipe(path, given))) or bool(found)


def full_disk(copy: Path, pick: random.Random) -> bool:
    """Write metrics of 100 steps while the disk is full during some of them.

    After the disk has space again, the file must have each step exactly once.
    """
    run_dir = copy / "full"
    run_dir.mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    full, free = sorted(pick.sample(range(1, 100), 2))
    with MetricsWriter(run_dir, -1) as writer:
        for step in range(100):
            if step == full:
                limit = (run_dir / METRICS).stat().st_size + pick.randrange(200)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            if step == free:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            writer.write(step, {"train/loss": 1.0})
    return [entry["step"] for entry in read_metrics(run_dir)] == [*range(100)]


CLASSES = [
    FaultClass(
        "checkpoint: flipped bit", 1000, refuses(lambda c, pick: flip(any_file(c, pick), pick))
    ),
    FaultClass("checkpoint: cut file", 300, refuses(lambda c, pick: cut(any_file(c, pick), pick))),
    FaultClass("checkpoint: missing file", 50, refuses(lambda c, pick: any_file(c, pick).unlink())),
    FaultClass("checkpoint: foreign file", 50, refuses(add_foreign)),
    FaultClass("checkpoint: FIFO", 50, refuses(lambda c, pick: become_fifo(any_file(c, pick)))),
    FaultClass("checkpoint: not finite, good checksums", 100, refuses(put_not_finite)),
    FaultClass("checkpoint: overlap or gap, good checksums", 100, refuses(overlap)),
    FaultClass("checkpoint: flipped bit of the manifest", 1000, flipped_manifest),
    FaultClass("prepare: broken gzip", 150, broken_archive("gz", gzip.compress)),
    FaultClass(
        "prepare: broken zstd",
        150,
        broken_archive("zst", zstandard.ZstdCompressor(write_checksum=True).compress),
    ),
    FaultClass("prepare: input changed while read", 200, changed_while_read),
    FaultClass("prepare: names that are not UTF-8", 50, odd_name),
    FaultClass("prepare: two at once", 10, two_at_once),
    FaultClass("prepare: damaged unfinished work", 100, damaged_work),
    FaultClass("corpus: damaged tokens or index", 300, damaged_corpus),
    FaultClass("cache: damaged", 150, damaged_cache),
    FaultClass("recipe: random values and flipped bits", 500, random_override),
    FaultClass("metrics: full disk", 50, full_disk),
]
