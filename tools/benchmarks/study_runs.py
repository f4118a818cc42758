"""The runs of a study: training and evaluation in child processes, and a result line for each."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import read_corpus_manifest
from diffmegatron.errors import UserError
from diffmegatron.evaluation.compare import final_figures, read_run
from diffmegatron.files import format_path, parse_json, read_bytes, write_durably
from diffmegatron.measurements.machine import cpu_name
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.training.monitoring.evaluators import HELD_OUT, TEST
from diffmegatron.training.safeguards import run_lock
from tools.benchmarks.study_file import DuringTraining, PlannedRun, Study

# Packages whose versions a run's numbers depend on.
_PACKAGES = ("torch", "megatron-core", "deepspeed", "transformers")
# Exit status of a ``diffmegatron`` command that a signal stopped and that can be resumed.
_EXIT_STOPPED = 75

Line = dict[str, Any]


class StoppedError(Exception):
    """A run was stopped by a signal, and can be resumed."""


class Lines:
    """The result file of a study: one line of JSON per finished run, sorted by the run's name.

    The file is replaced atomically, so it never has a partial line.

    Args:
        path: path of the file, which may be missing.

    Attributes:
        by_run: lines by the name of the run.
        of_others: lines of other studies, from the other result files in the same folder.

    Raises:
        UserError: If a file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_run = {line["run"]: line for line in read_lines(path)}
        others = sorted(other for other in path.parent.glob("*.jsonl") if other != path)
        self.of_others = [line for other in others for line in read_lines(other)]

    def add(self, line: Line) -> None:
        """Add the line of a run, or replace its earlier line."""
        self.by_run[line["run"]] = line
        lines = [json.dumps(each) + "\n" for _, each in sorted(self.by_run.items())]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(self._path, "".join(lines).encode())


def read_lines(path: Path) -> list[Line]:
    """Read the lines of a result file, which may be missing.

    Raises:
        UserError: If the file cannot be read.
    """
    content = read_bytes(path).splitlines() if path.exists() else []
    return [
        parse_json(each, Line, f"{format_path(path)} at line {number}")
        for number, each in enumerate(content, start=1)
    ]


class Runner:
    """Trainer and evaluator of a study's runs; several threads may call its methods at once.

    Args:
        study: the study.
        recipe: path of the study's recipe.
        work: folder of the runs, their logs and evaluations.
    """

    def __init__(self, study: Study, recipe: Path, work: Path) -> None:
        self._study, self._recipe, self._work = study, recipe, work
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._is_stopping = False

    def is_finished(self, run: PlannedRun, line: Line | None) -> bool:
        """Return whether a run has a line, and the line has all measures that the study needs.

        Args:
            run: the run.
            line: result line of the run; None if there is none.

        Raises:
            UserError: If the line is from a run with other settings or another corpus.
        """
        if line is None:
            return False
        if line["settings"] != self._settings(run):
            raise UserError(
                f"the results hold run {run.name!r} with other settings or of another corpus; "
                "rename the study's file, or remove the line to train the run again"
            )
        return self._has_evaluation(run, line)

    def find_in_other_studies(self, run: PlannedRun, lines: Sequence[Line]) -> Line | None:
        """Return the line of a run with the same settings in another study; None if there is none.

        The returned line has the names of this study: the names of the run, its arm and its size.

        Args:
            run: run that is not finished.
            lines: lines of other studies.
        """
        settings = self._settings(run)
        for line in lines:
            if line["settings"] == settings and self._has_evaluation(run, line):
                return line | describe_run(run)
        return None

    def finish(self, run: PlannedRun) -> Line:
        """Train and evaluate a run, resuming it if it was interrupted; return its line.

        Raises:
            UserError: If a command failed; the error names its log.
            StoppedError: If a command was stopped by a signal or by :meth:`stop`.
        """
        run_dir = self._work / run.name
        # A killed study may leave a process that still trains this run, so wait for its lock.
        with run_lock(run_dir, inf):
            pass
        along = self._along(run)
        # Keeping more checkpoints changes no result, so the settings in the line do not include it.
        kept = [f"checkpoint.keep_every={along.every}"] if along else []
        self._call(run, "train", self._recipe, *run.overrides, *kept, f"run_dir={run_dir}")
        line = self._line(run, run_dir)
        if evaluation := self._evaluation(run):
            (measures,) = self._evaluate(run, [run_dir], evaluation, "evaluation").values()
            line["measures"] |= measures
        if along:
            line["along"] = self._evaluate_along(run, run_dir, along)
        return line

    def stop(self) -> None:
        """Send SIGTERM to all running commands, so that they save and stop; start no new ones."""
        with self._lock:
            self._is_stopping = True
            for process in self._processes:
                process.terminate()

    def _call(self, run: PlannedRun, *arguments: object) -> None:
        """Run a command of ``diffmegatron`` with its output in the run's log."""
        command = [sys.executable, "-m", "diffmegatron", *map(str, arguments)]
        # By default each command has one thread, because more threads than cores wait for each
        # other. The default does not depend on the machine, because the number of threads changes
        # the last digits of the results.
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        log = self._work / "logs" / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            with self._lock:
                if self._is_stopping:
                    raise StoppedError
                process = subprocess.Popen(
                    command, env=environment, stdout=stream, stderr=subprocess.STDOUT
                )
                self._processes.add(process)
            status = process.wait()
            with self._lock:
                self._processes.remove(process)
        if status == _EXIT_STOPPED or self._is_stopping:
            raise StoppedError
        if status:
            raise UserError(
                f"'{arguments[0]}' of run {run.name!r} failed with exit status {status}; "
                f"{format_path(log)} ends with the reason"
            )

    def _evaluate(
        self, run: PlannedRun, targets: Sequence[Path], arguments: Sequence[str], folder: str
    ) -> dict[str, dict[str, float]]:
        """Evaluate runs or checkpoints, and return their measures.

        Args:
            run: run to which the targets belong.
            targets: paths of the runs or checkpoints to evaluate.
            arguments: arguments of ``diffmegatron evaluate``, without targets and ``--out``.
            folder: name of the folder for the results, within the folder of the study's runs.

        Returns:
            A dict for each target: its measures by name. The key of a target is the last component
            of its path.
        """
        out = self._work / folder / run.name
        self._call(run, "evaluate", *targets, *arguments, "--out", out)
        results = json.loads(read_bytes(out / "results.json"))
        return {path.name: suite_measures(results, path.name) for path in targets}

    def _evaluate_along(self, run: PlannedRun, run_dir: Path, along: DuringTraining) -> Line:
        """Evaluate the checkpoints of a run that ``along`` selects.

        Returns:
            A dict with two entries. ``evaluate`` has the arguments of the evaluation, and
            ``points`` a pair for each checkpoint: the number of trained tokens, and the measures.

        Raises:
            UserError: If a checkpoint is missing, or the evaluation failed.
        """
        training = self._load(run).training
        steps = range(along.every, training.steps + 1, along.every)
        store = CheckpointStore(run_dir)
        complete = store.complete()
        for step in steps:
            if step not in complete:
                raise UserError(
                    f"{format_path(run_dir)} has no checkpoint of step {step}; make along.every a "
                    "multiple of checkpoint.interval, and remove the folder to train the run again"
                )
        measures = self._evaluate(
            run, [store.path(step) for step in steps], along.evaluate, "along"
        )
        points = [
            [step * training.tokens_per_step, each]
            for step, each in zip(steps, measures.values(), strict=True)
        ]
        return {"evaluate": list(along.evaluate), "points": points}

    def _load(self, run: PlannedRun) -> Recipe:
        return load_recipe(self._recipe, [*run.overrides, f"run_dir={self._work / run.name}"])

    def _has_evaluation(self, run: PlannedRun, line: Line) -> bool:
        """Return whether a line has the measures of all suites that the study evaluates."""
        wanted, along = self._evaluation(run), self._along(run)
        has_along = along is None or line.get("along", {}).get("evaluate") == list(along.evaluate)
        return has_along and (not wanted or line["evaluate"] == wanted)

    def _evaluation(self, run: PlannedRun) -> list[str]:
        return list(self._study.evaluate) if run.is_reported else []

    def _along(self, run: PlannedRun) -> DuringTraining | None:
        return self._study.along if run.is_reported else None

    def _settings(self, run: PlannedRun) -> str:
        """Return a hash of a run's recipe and of the content of its corpora and tokenizers.

        Paths do not count. Keys with default values do not count either, so that a key that is
        added to recipes later does not change the hash.
        """
        recipe = self._load(run)
        values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"run_dir"})
        manifests = [read_corpus_manifest(source.path) for source in recipe.data.sources]
        for source, manifest in zip(values["data"]["sources"], manifests, strict=True):
            source["path"] = manifest.content
        values["data"]["tokenizer"] = [manifest.tokenizer.sha256 for manifest in manifests]
        kind = recipe.model.attention.kind
        text = json.dumps([kind, values], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _line(self, run: PlannedRun, run_dir: Path) -> Line:
        recipe, recorded = self._load(run), read_run(run_dir)
        figures = final_figures(recorded)
        names = (HELD_OUT, TEST, "train/loss", "lambda, mean of the layers", "tokens per second")
        figures |= {TEST: losses[-1][1]} if (losses := recorded.series(TEST)) else {}
        return describe_run(run) | {
            "kind": recipe.model.attention.kind,
            "settings": self._settings(run),
            "evaluate": self._evaluation(run),
            "parameters": figures["parameters"],
            "parameters without embeddings": count_parameters(recipe.model).without_embeddings,
            "tokens": figures["tokens"],
            "held out": recorded.series(HELD_OUT),
            "measures": {name: figures[name] for name in names if name in figures},
            "environment": describe_environment(),
        }


def differences(recorded: Line, repeated: Line) -> list[str]:
    """Return a sentence for each value in which two lines of a run differ, except the speed."""
    first, second = (dict(_values(json.loads(json.dumps(each)))) for each in (recorded, repeated))
    return [
        f"{name} is {second.get(name)!r}, and {first.get(name)!r} was recorded"
        for name in first | second
        if first.get(name) != second.get(name) and name != "measures, tokens per second"
    ]


def _values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers, texts and truth values of nested dicts and lists with their keys."""
    if not isinstance(value, dict | list):
        yield name, value
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _values(each, f"{name}, {key}" if name else str(key))


def describe_run(run: PlannedRun) -> Line:
    """Return the fields of a run's line that identify the run: arm, size, seed, chosen value."""
    return {
        "run": run.name,
        "size": run.cell.size,
        "arm": run.cell.arm,
        "seed": run.seed,
        "chosen": run.chosen,
        "is_reported": run.is_reported,
        "overrides": run.overrides,
    }


def suite_measures(results: dict[str, Any], target: str) -> dict[str, float]:
    """Return the measures of one target as a dict with keys of the form ``SUITE: MEASURE``.

    Args:
        results: content of the file ``results.json`` that ``diffmegatron evaluate`` wrote.
        target: name of the evaluated run or checkpoint.
    """
    found = {}
    for suite, outcome in results["suites"].items():
        for measure, each in outcome["measures"].items():
            estimate = each["targets"][target]
            if estimate is not None:
                found[f"{suite}: {measure}"] = estimate["value"]
        totals = outcome["totals"].get(target, {})
        found |= {f"{suite}: {name}": total["value"] for name, total in totals.items()}
    return found


def describe_environment() -> dict[str, str]:
    """Return versions and hardware, which influence the last digits and the speed of a run."""
    versions = {name: metadata.version(name) for name in _PACKAGES}
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    return {"python": platform.python_version(), **versions, "cpu": cpu_name(), "threads": threads}
