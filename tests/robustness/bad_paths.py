"""Kinds of bad paths, and a function that runs a command with a bad path in place of a good path.

The commands and their parameters are read from the Typer application. If a parameter has a new
name in --help, an assertion fails until :class:`Example` has a good value for this name.
"""

import io
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from unittest import mock

from diffmegatron.attempts.ledger import Facts, Ledger
from diffmegatron.cli import main
from diffmegatron.config.load import load_recipe
from diffmegatron.hf.import_model import import_model
from diffmegatron.optim.zero import import_deepspeed
from diffmegatron.training.monitoring.metrics import MetricsWriter
from tests import forks
from tests.checkpoints import write_checkpoint
from tests.conftest import TINY
from tests.permissions import without_roots_power
from tests.pretrained import write_pretrained
from tests.robustness.cases import check_sentence
from tests.robustness.command_line import Command, Parameter, commands

# Time limit of a command. A command that reads a FIFO would wait forever; the slowest of the other
# commands takes some seconds.
SECONDS = 240
CLUSTER = "{gpus_per_node: 0, ranks_per_node: 1, cpus_per_rank: 1, time_limit: '30'}"
# Parameters that the command line declares as text, but that the command uses as a path.
PATHS_AS_TEXT = {("prepare", "tokenizer"), ("evaluate", "data")}
# Keys of a recipe that contain a path, each with a format of its value. The commands in OVERRIDDEN
# are tried with each key.
KEYS = {
    "run_dir": "{}",
    "data.sources": "[{{path: {}}}]",
    "data.tokenizer": "{}",
    "checkpoint.start_from": "{}",
    "model.attention": "{{kind: dex, num_heads: 4, selected_heads: {}}}",
}
OVERRIDDEN = [("train",), ("launch",), ("data", "inspect"), ("attempt", "begin")]
# Further arguments without which a command ends before it uses the path.
MORE = {
    ("evaluate", "haystack"): ["--suite", "needle"],
    ("evaluate", "data_dir"): ["--suite", "math"],
    ("prepare", "inputs"): ["--tokenizer", "bytes"],
    ("prepare", "output"): ["--tokenizer", "bytes"],
    ("dex", "select"): ["--sequences", "1"],
    ("launch",): ["--torchrun", "--rendezvous", "n0:29500"],
}
# Ends of the names of lock files, which `snapshot` leaves out.
LOCKS = ("lock", ".lock")


# Each of the following functions returns a bad path of one kind. The functions may create files in
# the folder ``place``. Some of them make a copy of ``good``, a good path.


def missing(place: Path, good: Path | None) -> str:
    return str(place / "missing")


def in_no_folder(place: Path, good: Path | None) -> str:
    return str(place / "no" / "such")


def folder(place: Path, good: Path | None) -> str:
    (place / "folder").mkdir()
    return str(place / "folder")


def file(place: Path, good: Path | None) -> str:
    (place / "file").write_text("something else\n")
    return str(place / "file")


def below_a_file(place: Path, good: Path | None) -> str:
    return f"{file(place, good)}/name"


def fifo(place: Path, good: Path | None) -> str:
    os.mkfifo(place / "fifo")
    return str(place / "fifo")


def in_a_folder_of_fifos(place: Path, good: Path | None) -> str:
    """Return a folder of FIFOs with the names of files that commands write or read."""
    (place / "fifos").mkdir()
    for name in OWN_NAMES:
        os.mkfifo(place / "fifos" / name)
    return str(place / "fifos")


def link_to_itself(place: Path, good: Path | None) -> str:
    (place / "link").symlink_to(place / "link")
    return str(place / "link")


def long_name(place: Path, good: Path | None) -> str:
    return str(place / (300 * "x"))


def not_utf8(place: Path, good: Path | None) -> str:
    return str(copy(good, place / os.fsdecode(b"\xff\xfe")))


def unreadable(place: Path, good: Path | None) -> str:
    path = copy(good, place / "unreadable")
    for each in sorted(place.rglob("unreadable*"), reverse=True):
        each.chmod(0)
    return str(path)


def unwritable(place: Path, good: Path | None) -> str:
    (place / "unwritable").mkdir(mode=0o500)
    return str(place / "unwritable" / "name")


def nul(place: Path, good: Path | None) -> str:
    return str(place / "a\0b")


def empty(place: Path, good: Path | None) -> str:
    return ""


def of_the_system(place: Path, good: Path | None) -> str:
    """Return a folder that is read-only even for root."""
    return "/proc"


def full_disk(place: Path, good: Path | None) -> str:
    """Return a good path; every write to a file fails (``LIMITS``)."""
    return str(copy(good, place / "good"))


def nearly_full_disk(place: Path, good: Path | None) -> str:
    """Return a good path; no file can become larger than two KiB (``LIMITS``)."""
    return str(copy(good, place / "good"))


def few_descriptors(place: Path, good: Path | None) -> str:
    """Return a good path; the command can open only two more files (``LIMITS``)."""
    return str(copy(good, place / "good"))


def little_memory(place: Path, good: Path | None) -> str:
    """Return a good path; the command can allocate only ``MIB`` MiB more."""
    return str(copy(good, place / "good"))


# Limits on a resource of the process while a command runs.
LIMITS: dict[Callable[[Path, Path | None], str], tuple[int, int]] = {
    full_disk: (resource.RLIMIT_FSIZE, 0),
    nearly_full_disk: (resource.RLIMIT_FSIZE, 2048),
    few_descriptors: (resource.RLIMIT_NOFILE, 2),
}
# Limit of :func:`little_memory`. A small run needs some hundred MiB.
MIB = 24
SECONDS_OF_NATIVE_CODE = 90
KINDS: tuple[Callable[[Path, Path | None], str], ...] = (
    *(missing, in_no_folder, folder, file, below_a_file, fifo, in_a_folder_of_fifos),
    *(link_to_itself, long_name, not_utf8, unreadable, unwritable, nul, empty, of_the_system),
    *(*LIMITS, little_memory),
)
# Names of files that commands read or write in a folder whose path they get.
OWN_NAMES = (
    *("compare.png", "compare.md", "compare.json", "recipe.yaml", "checkpoints", "lock", "base"),
    *("metrics.jsonl", "evaluate.lock", "results.json", "attempts", "quickstart.yaml"),
    *("config.json", "manifest.json", "torchrun.sh", "tokenizer.json"),
)


def copy(good: Path | None, target: Path) -> Path:
    """Copy a good file, folder or prefix to ``target``, and return ``target``.

    If ``good`` is None, nothing is copied.
    """
    if good is None:
        return target
    if good.is_dir():
        shutil.copytree(good, target)
    elif good.is_file():
        shutil.copy(good, target)
    for part in good.parent.glob(f"{good.name}.*"):
        if part.is_file():
            shutil.copy(part, f"{target}{part.suffix}")
    return target


def make_inputs(made: Path) -> None:
    """Write good inputs of every command into a folder; no command changes them."""
    import_deepspeed()  # The first import of DeepSpeed in a process may print warnings.
    (made / "cluster.yaml").write_text(CLUSTER)
    (made / "text.txt").write_text("some words of a text. " * 200)
    write_pretrained(made / "hf", "llama 2")
    import_model(made / "hf", made / "imported", verify=False)
    for step in (1, 2):
        write_checkpoint(made / "run", step)
    with MetricsWriter(made / "run", -1) as writer:
        for step in range(1, 4):
            writer.write(step, {"train/loss": 3.0 / step})
    recipe = load_recipe(made / "run/recipe.yaml", [f"run_dir={made}/attempts/run"])
    facts = Facts(job="17", nodes=("n0",), ranks=1, versions={}, commit=None)
    Ledger(made / "attempts/run").begin([recipe], facts)


class Example:
    """Good values of the parameters of all commands, by their metavars (names in --help).

    Args:
        made: folder of :func:`make_inputs`.
        corpus: prefix of a prepared corpus.
        place: folder of one case, in which new files are written.
    """

    def __init__(self, made: Path, corpus: Path, place: Path) -> None:
        self._given = place / "given"
        self._given.mkdir()
        recipe = self._given / "recipe.yaml"
        text = TINY.format(run_dir=self._given / "run", corpus=corpus)
        recipe.write_text(text.replace("steps: 20", "steps: 3"))
        self._paths = {
            "CONFIG": recipe,
            "CONFIG...": recipe,
            "FILE": made / "cluster.yaml",
            "RUN_DIR": made / "run",
            "PATH": made / "run",
            "CHECKPOINT": made / "imported",
            "MODEL": made / "imported",
            "TARGET": made / "hf",
            "HF_DIR": made / "hf",
            "INPUT": made / "text.txt",
            "HAYSTACK": made / "text.txt",
            "[NAME=]PATH": made / "text.txt",
            "ATTEMPT": made / "attempts/run/attempts/0001",
            "PREFIX": corpus,
        }
        self._words = {
            "NODES": "2",
            "NAME[,NAME]": "loss",
            "KEEP_LAST": "1",
            "LAST": "2",
            "NAME": "quickstart",
            "PROMPT": "def",
            "TOKENIZER": "bytes",
        }
        self._new = {"OUT", "OUTPUT", "DIR", "PNG", "DATA_DIR"}

    def path(self, parameter: Parameter) -> Path | None:
        """Return a good path for a parameter; None if no path exists yet, as for an output."""
        return self._paths.get(parameter.metavar)

    def word(self, parameter: Parameter) -> str:
        """Return a good value for a parameter that does not get the bad path."""
        name = parameter.metavar
        if name in self._new:
            return str(self._given / name.lower())
        assert name in {*self._paths, *self._words}, f"{name}: add a good value to Example"
        return str(self._paths.get(name) or self._words[name])


class Place(NamedTuple):
    """Place of a command where a path is given.

    Attributes:
        command: the command.
        parameter: parameter with the path; None: the path is in an override of the recipe.
        key: key of the override; empty for a parameter.
    """

    command: Command
    parameter: Parameter | None
    key: str = ""

    def __str__(self) -> str:
        name = self.key if self.parameter is None else self.parameter.name
        return f"{' '.join(self.command.words)}: {name}"

    def good(self, example: Example, made: Path, corpus: Path) -> Path | None:
        """Return a good path for this parameter or key; None if none exists, as for an output."""
        if self.parameter is not None:
            return example.path(self.parameter)
        return {"data.sources": corpus, "checkpoint.start_from": made / "run"}.get(self.key)

    def words(self, example: Example, path: str) -> list[str]:
        """Return the command line with ``path`` in this place and only the necessary arguments."""
        options, places = [], []
        for each in self.command.parameters:
            if each == self.parameter or each.is_required or each.metavar == "[NAME=]PATH":
                words = each.words(path if each == self.parameter else example.word(each))
                (options if each.option else places).extend(words)
        if self.parameter is None:
            quoted = '"' + path.replace("\0", "\\0") + '"'
            places.append(f"{self.key}={KEYS[self.key].format(quoted)}")
        own = (*self.command.words, "" if self.parameter is None else self.parameter.name)
        more = MORE.get(own, MORE.get(self.command.words, []))
        return [*self.command.words, *options, *more, "--", *places]


def places() -> Iterator[Place]:
    """Yield every place of every command."""
    for command in commands():
        for parameter in command.parameters:
            if parameter.is_path or (command.words[-1], parameter.name) in PATHS_AS_TEXT:
                yield Place(command, parameter)
        if command.words in OVERRIDDEN:
            yield from (Place(command, None, key) for key in KEYS)


def try_kind(
    tried: Place,
    kind: Callable[[Path, Path | None], str],
    folder: Path,
    made: Path,
    corpus: Path,
) -> str | None:
    """Run a command in this process with a bad path.

    Args:
        tried: place of the path in the command.
        kind: function of ``KINDS`` that makes the bad path.
        folder: new folder, in which the command runs.
        made: folder of :func:`make_inputs`.
        corpus: prefix of a prepared corpus.

    Returns:
        Description of the problem. None means that the exit status was 0 or 75, or that the command
        changed no file and ended with one sentence (status 2 or 69) or with a result on standard
        output (status 1).
    """
    (folder / "cwd").mkdir(parents=True)
    os.chdir(folder / "cwd")
    example = Example(made, corpus, folder)
    path = kind(folder, tried.good(example, made, corpus))
    before = snapshot(folder) | snapshot(made)
    words = tried.words(example, path)
    if kind is little_memory:
        status, out, err = run_with_little_memory(words)
    else:
        with limited(*LIMITS.get(kind, ())):
            status, out, err = run(words)
    if isinstance(status, int) and status < 0:
        # Libraries in C++ and Rust abort the process, or wait without end, if they cannot allocate
        # memory or start a thread. No result may be half-written, so the next start must work.
        again = run(words)
        return None if again[0] == 0 else f"after signal {-status}: {again}"
    problem = _wrong(status, out, err)
    if problem is not None or status in (0, 75):
        return problem
    after = snapshot(folder) | snapshot(made)
    changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
    if kind in (*LIMITS, little_memory):
        # The path is good, so the command begins its work, and may leave empty folders.
        files = [name for name in changed if not Path(name).is_dir()]
        changed = [name for name in files if not _RESUMED.search(name)]
    return f"{changed} changed and status is {status}: {err}" if changed else None


# Complete files from which the same command continues: metrics, recipe and (empty) stacks of a run,
# items of an evaluation, the cached order of a corpus, and the committed work of prepare.
_RESUMED = re.compile(
    r"\.jsonl$|/tensorboard/|/recipe\.yaml$|/stacks/|\.int64$|/contents\.json$|\.partial/"
)


@contextmanager
def limited(limit: int | None = None, value: int = 0) -> Iterator[None]:
    """Set a limit of this process within the context; None sets nothing.

    A limit of descriptors counts from the highest open one.
    """
    if limit is None:
        yield
        return
    if limit == resource.RLIMIT_NOFILE:
        value += 1 + max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def _wrong(status: object, out: str, err: str) -> str | None:
    if not isinstance(status, int) or "Traceback" in out + err:
        return f"{status}: {err[-600:]}"
    said = [line for line in err.splitlines() if not line.startswith("WARNING ")]
    progress = ("scoring heads", "prepare ")
    said = [line for line in said if " ETA " not in line and not line.startswith(progress)]
    is_sentence = False
    if status in (2, 69) and said:
        # The command-line parser prints the usage first, and its sentence in the last line.
        is_usage = said[0].startswith("Usage: ")
        is_sentence = said[-1].startswith("Error: " if is_usage else "error: ")
        is_sentence = is_sentence and (is_usage or len(said) == 1)
        check_sentence(said[-1])
    # Status 1: the input is damaged or the job waits, and standard output describes this.
    if is_sentence or status in (0, 75) or (status == 1 and out.strip()):
        return None
    return f"status {status} with {err!r} and {out!r}"


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of each file below a folder, and (0, 0) for each folder.

    Lock files are left out.
    """
    found = {}
    for at, folders, files in os.walk(folder):
        found |= {f"{at}/{name}": (0, 0) for name in folders}
        for name in files:
            if not name.endswith(LOCKS):
                state = os.lstat(f"{at}/{name}")
                found[f"{at}/{name}"] = (state.st_size, state.st_mtime_ns)
    return found


class _Hung(BaseException):
    """Error raised in a command that hangs.

    The program's handlers of Exception do not catch this error.
    """


class _Stream(io.TextIOWrapper):
    """Stream in memory that encodes as Python's standard streams do in a UTF-8 locale."""

    def __init__(self, errors: str) -> None:
        super().__init__(io.BytesIO(), "utf-8", errors=errors, write_through=True)

    def text(self) -> str:
        content = self.buffer
        assert isinstance(content, io.BytesIO)
        return content.getvalue().decode(errors="surrogateescape")


def run_with_little_memory(words: list[str]) -> tuple[int, str, str]:
    """Run a command in a fork, which native code may abort; return what :func:`run` returns.

    Native code may also wait without end for a thread that it could not start. SIGTERM then ends
    the fork.
    """
    command = [forks.python(), "-m", "tests.robustness.little_memory", str(MIB), *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS_OF_NATIVE_CODE)
        except subprocess.TimeoutExpired:
            process.terminate()
            out, err = process.communicate()
    return process.returncode, out, err


def run(words: list[str]) -> tuple[object, str, str]:
    """Run a command in this process, in which permission bits also restrict root.

    Returns:
        A tuple of three values: the exit status or the end of the traceback, the standard output,
        and the standard error.
    """

    def hang(*_: int | FrameType | None) -> None:
        raise _Hung

    out, err = _Stream("strict"), _Stream("backslashreplace")
    status: object = 0
    previous = signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        with (
            without_roots_power(),
            mock.patch.object(sys, "argv", ["diffmegatron", *words]),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            main()
    except SystemExit as end:
        status = 0 if end.code is None else end.code
    except BaseException as error:
        status = "".join(traceback.format_exception(error)[-3:])
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return status, out.text(), err.text()
