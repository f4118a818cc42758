"""The page of `make gpu-report`: a sentence for each step, read from the step's files."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.files import shorten
from diffmegatron.measurements.cache import read_measurements
from diffmegatron.training.monitoring.metrics import Entry, read_metrics

DONE, FAILED, NOT_TESTED = "done", "failed", "not tested"
# Number of failed tests that the page names; the file of outcomes names all.
NAMED = 3
# Metrics of a step that must be equal to the bit after a stop and resume.
EXACT = ("train/loss", "train/grad_norm")
# Measures of the evaluation that the page shows.
MEASURES = ("nats per token", "prefill, tokens/s", "training, tokens/s")

_SEND = (
    "Please open an issue whose title is the name of the GPU, and attach `gpu_report.tar.gz` of "
    "this folder. The archive holds this page, the numbers, the logs and the recorded metrics, but "
    "no weights and no text. The logs name folders of this machine and its user; "
    "`tar tzf gpu_report.tar.gz` lists the files."
)
_REHEARSAL = "Tiny sizes show that the steps run, and not whether a GPU computes correctly."


@dataclass(frozen=True)
class Finding:
    """Finding of a step: one sentence, and whether the result is right (None: not decided).

    ``is_tested`` is false if the step consists of tests and all were skipped.
    """

    sentence: str
    is_right: bool | None = None
    is_tested: bool = True


@dataclass(frozen=True)
class Result:
    """Row of a step; ``status`` is "done" if all processes of the step succeeded."""

    step: str
    status: str
    seconds: int
    sentence: str
    is_right: bool | None = None
    is_tested: bool = True

    @property
    def has_failed(self) -> bool:
        """True if a process of the step ended with a wrong exit status."""
        return self.status.startswith(FAILED)

    @property
    def decision(self) -> str:
        """``wrong``, ``right`` or ``not tested`` by the files of the step, otherwise its status."""
        if self.is_right is False:
            return "wrong"
        if not self.is_tested and self.status == DONE:
            return NOT_TESTED
        return "right" if self.is_right and self.status == DONE else self.status


def write_page(
    path: Path,
    machine: Mapping[str, str],
    results: Sequence[Result],
    not_ended: Sequence[str],
    *,
    is_rehearsal: bool,
) -> None:
    """Write the page of the steps that have ended; ``not_ended`` names the others."""
    wrong = [each.step for each in results if each.decision == "wrong"]
    failed = [each.step for each in results if each.has_failed]
    skipped = [each.step for each in results if each.decision == NOT_TESTED]
    unfinished = [each.step for each in results if each.status != DONE and not each.has_failed]
    versions = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "gpu")
    lines = [
        f"# {'Rehearsal of a GPU report' if is_rehearsal else 'GPU report'}: {machine['gpu']}",
        "",
        f"**Wrong: {', '.join(wrong) or 'nothing'}. Failed: {', '.join(failed) or 'nothing'}. "
        f"Not tested: {', '.join(skipped) or 'nothing'}.** "
        f"Unfinished: {', '.join([*unfinished, *not_ended]) or 'nothing'}.",
        "",
        f"{versions}.",
        "",
        "| step | result | time | finding |",
        "|---|---|---|---|",
        *(f"| {r.step} | {r.decision} | {r.seconds} s | {r.sentence} |" for r in results),
        "",
        _REHEARSAL if is_rehearsal else _SEND,
        "",
    ]
    path.write_text("\n".join(lines))


def summarize(step: str, folder: Path) -> Finding:
    """Return the finding of a step; if its files are missing or cut off, the end of its log."""
    try:
        return _SUMMARIES[step.partition("_")[0]](folder, step)
    except (OSError, ValueError, LookupError):
        lines = (folder / f"{step}.log").read_text(errors="replace").split("\n")
        last = next(filter(str.strip, reversed(lines)), "")
        return Finding(f"{step}.log ends with: {shorten(last.strip()).replace('|', '/')}")


def _doctor(*_: object) -> Finding:
    return Finding("doctor.log shows what is installed")


def _tests(folder: Path, step: str) -> Finding:
    rows = [json.loads(line) for line in (folder / f"{step}.json").read_text().splitlines()]
    outcomes = [row for row in rows if "outcome" in row]
    counts = Counter(row["outcome"] for row in outcomes)
    failed = [row["name"].rpartition("::")[2] for row in outcomes if row["outcome"] == "failed"]
    sentence = (
        f"{counts['passed']} of {rows[0]['collected']} tests passed, {len(failed)} failed, "
        f"{counts['skipped']} were skipped"
    )
    values = [row["values"] for row in outcomes if row["values"]]
    errors = [each["planned"] / each["allocated"] - 1 for each in values]
    if errors:
        sentence += f"; plan's bytes - the allocator's: {min(errors):+.1%} to {max(errors):+.1%}"
    if failed:
        sentence += f": {', '.join(failed[:NAMED])}{', ...' if len(failed) > NAMED else ''}"
    is_tested = bool(failed or counts["passed"])
    return Finding(sentence, not failed if is_tested else None, is_tested)


def _tune(folder: Path, _: str) -> Finding:
    (file,) = (folder / "cache").glob("*.json")
    kernels, is_right = read_measurements(file).kernels, True
    sentences = []
    for kernel in kernels:
        fastest = kernel.fastest
        chosen = "no backend is right"
        if fastest is not None and fastest.seconds is not None:
            chosen = f"{fastest.backend} {1e3 * fastest.seconds:.2f} ms"
        wrong = [each for each in kernel.candidates if each.problem]
        # A backend that returned no result may only lack support for the shape or this GPU.
        is_right = is_right and not [each for each in wrong if each.error is not None]
        names = f" (wrong: {', '.join(each.backend for each in wrong)})" if wrong else ""
        sentences.append(f"{kernel.shape.operation} {chosen}{names}")
    return Finding("; ".join(sentences), is_right if kernels else None)


def _layer(folder: Path, _: str) -> Finding:
    report = json.loads((folder / "layer.json").read_text())
    depth, rows = [*report["measured"].items()][-1]
    ratios = ", ".join(
        f"{name.partition(',')[0]} {row['ratio_of_throughput']:.2f}"
        for name, row in rows.items()
        if name != "Transformer"
    )
    return Finding(f"throughput of {depth} layers / that of the Transformer: {ratios}")


def _prepare(*_: object) -> Finding:
    return Finding("Python's standard library as bytes")


def _train(folder: Path, step: str) -> Finding:
    entries = _steps(folder / "work" / step.removeprefix("train_"))
    late = entries[len(entries) // 3 :]  # The first steps compile kernels.
    losses = [entry["train/loss"] for entry in entries]
    parts = [
        f"loss {losses[0]:.3f} to {losses[-1]:.3f} at step {entries[-1]['step']:.0f}",
        f"{_median(late, 'perf/tokens_per_second'):,.0f} tokens/s",
        f"MFU {_median(late, 'perf/mfu'):.1%}",
        f"peak {_median(late, 'mem/peak_gib'):.2f} GiB",
    ]
    is_right = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return Finding(", ".join(part for part in parts if "nan" not in part), is_right)


def _resume(folder: Path, _: str) -> Finding:
    runs = [folder / "work" / name for name in ("whole", "resumed")]
    whole, resumed = ({entry["step"]: entry for entry in _steps(run)} for run in runs)
    for step, entry in whole.items():
        if any(entry[name] != resumed[step][name] for name in EXACT):
            return Finding(f"the loss of step {step:.0f} of {len(whole)} differs", False)
    if _checksums(runs[0]) != _checksums(runs[1]):
        return Finding("losses are equal, but the saved weights or moments differ", False)
    return Finding(
        f"losses, gradient norms, weights and moments of {len(whole)} steps are equal to the bit "
        "after a stop by SIGTERM",
        True,
    )


def _checksums(run_dir: Path) -> dict[str, int]:
    """Return the CRC-32 of each rank's weights, moments and random states at the last step."""
    last = CheckpointStore(run_dir).latest()
    if last is None:
        raise LookupError(run_dir)
    files = read_checkpoint_manifest(last).files
    return {file.name: file.crc32 for file in files if file.name.startswith("rank_")}


def _export(folder: Path, _: str) -> Finding:
    suites = json.loads((folder / "evaluation/results.json").read_text())["suites"]
    measures = {
        name: found for suite in suites.values() for name, found in suite["measures"].items()
    }
    sentences = [
        f"{name}: "
        + ", ".join(
            f"{target} {each['value']:,.4g}" for target, each in measures[name]["targets"].items()
        )
        for name in MEASURES
        if name in measures
    ]
    return Finding(f"exports equal the trained networks; in transformers {'; '.join(sentences)}")


def _steps(run_dir: Path) -> list[Entry]:
    return [entry for entry in read_metrics(run_dir) if "train/loss" in entry]


def _median(entries: Sequence[Entry], name: str) -> float:
    return median([entry[name] for entry in entries if name in entry] or [math.nan])


_SUMMARIES: dict[str, Callable[[Path, str], Finding]] = {
    "doctor": _doctor,
    "kernels": _tests,
    "tune": _tune,
    "layer": _layer,
    "memory": _tests,
    "prepare": _prepare,
    "train": _train,
    "resume": _resume,
    "export": _export,
}
