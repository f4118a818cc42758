"""``diffmegatron status``: show the progress of a job and its attempts (starts of its ranks)."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from diffmegatron.attempts.decision import Cause
from diffmegatron.attempts.ends import PREFLIGHT, Heartbeat, read_heartbeat
from diffmegatron.attempts.ledger import MAX_FAULTS, Attempt, Ledger, suspects
from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import RECIPE, CheckpointStore
from diffmegatron.checkpoint.stage_folders import only_last, stage_folders
from diffmegatron.config.load import load_resolved
from diffmegatron.errors import UserError
from diffmegatron.files import escape, format_path, shorten
from diffmegatron.operations.sbatch_file import JOB_RECIPE, read_job_number
from diffmegatron.training.monitoring.due import unrecorded_at
from diffmegatron.training.monitoring.metrics import Entry, newest_entries

_SHOWN_ATTEMPTS = 12


@dataclass(frozen=True)
class Status:
    """Progress of a job; a value that is not known yet is None.

    Attributes:
        state: one sentence for the user.
        exit_status: exit status of ``diffmegatron status``.
        is_over: whether the job has ended and no attempt follows.
        run_dir: folder of the run, or of the current stage.
        checkpoint: newest checkpoint of the run or stage.
        step: last step reached.
        steps: total steps of the run or stage.
        seconds_left: remaining training time at the recent speed.
        values: name of each metric -> its newest value.
        job: Slurm ID of a job that may be queued or running.
        attempts: recorded attempts, oldest first.
        suspects: host name -> number of recent attempts in which the host was blamed or slow.
        stragglers: hosts whose ranks are slow in the newest attempt.
    """

    state: str
    exit_status: int
    is_over: bool
    run_dir: str
    checkpoint: Path | None
    step: int | None = None
    steps: int | None = None
    seconds_left: float | None = None
    values: dict[str, float] = field(default_factory=dict)
    job: str | None = None
    attempts: tuple[Attempt, ...] = ()
    suspects: dict[str, int] = field(default_factory=dict)
    stragglers: tuple[str, ...] = ()


def examine_run(run_dir: Path) -> Status:
    """Read the status of a job from the files in its ``run_dir``, without calling Slurm."""
    ledger = Ledger(run_dir)
    attempts = ledger.attempts()
    if not attempts and run_dir.resolve().name in _stages_beside(run_dir):
        raise UserError(
            f"{format_path(run_dir)} is a stage of {format_path(run_dir.parent)}; give that folder "
            "instead"
        )
    submitted = _submitted(run_dir, attempts)
    if not attempts:
        if submitted is not None:
            return _status_in_queue(run_dir, submitted)
        return _status_of_chain(run_dir) or _status_without_ledger(run_dir)
    last = attempts[-1]
    heartbeat = read_heartbeat(ledger.folder(last.number))
    stage = _current_stage(last, heartbeat) or str(run_dir)
    steps = last.stages.get(stage)
    entries = newest_entries(Path(stage))
    is_checked = (ledger.folder(last.number) / PREFLIGHT).exists()
    state, exit_status = _state(last, heartbeat, time.time(), is_checked=is_checked)
    if submitted is not None:
        state, exit_status = f"{_queue_sentence(submitted)}; before it: {state}", 1
    is_over = last.is_over and submitted is None
    values = {name: value for entry in entries for name, value in entry.items()}
    step = heartbeat.step if heartbeat is not None else None
    if step is None and "step" in values:
        step = int(values["step"])
    return Status(
        state=state,
        exit_status=exit_status,
        is_over=is_over,
        run_dir=stage,
        step=step,
        steps=steps,
        seconds_left=_seconds_left(entries, step, steps),
        values=values,
        checkpoint=CheckpointStore(Path(stage)).latest(),
        job=None if is_over else submitted or last.facts.job or None,
        attempts=tuple(attempts),
        suspects=suspects(attempts),
        stragglers=last.hosts_of(heartbeat.stragglers) if heartbeat is not None else (),
    )


def _submitted(run_dir: Path, attempts: Sequence[Attempt]) -> str | None:
    """Return the Slurm ID of the submitted job if it has not begun an attempt, otherwise None."""
    number = read_job_number(run_dir)
    return None if number in {attempt.facts.job for attempt in attempts} else number


def _queue_sentence(number: str) -> str:
    return f"job {shorten(number)} has not started: it waits in the queue or was cancelled there"


def _status_in_queue(run_dir: Path, number: str) -> Status:
    """Return the status of a submitted job that has not begun an attempt."""
    return Status(
        state=_queue_sentence(number),
        exit_status=1,
        is_over=False,
        run_dir=str(run_dir),
        checkpoint=CheckpointStore(run_dir).latest(),
        job=number,
    )


def _status_of_chain(run_dir: Path) -> Status | None:
    """Return the status of the current stage of ``launch --chain``; None without a chain."""
    try:
        stages = stage_folders(run_dir, JOB_RECIPE, recipe=JOB_RECIPE)
    except UserError:
        return None
    found = None
    for place, stage in enumerate(stages, 1):
        if stage.name is None:
            return None
        found = examine_run(stage.run_dir)
        found = replace(found, state=f"stage {stage.name}, {place} of {len(stages)}: {found.state}")
        if not found.is_over or found.exit_status != 0:
            break
    return found


def _status_without_ledger(run_dir: Path) -> Status:
    """Return the status of a run that was started without a job script."""
    stage = only_last(stage_folders(run_dir, RECIPE))
    folder = stage.run_dir
    entries, checkpoint = newest_entries(folder), CheckpointStore(folder).latest()
    recipe = load_resolved(folder / RECIPE)
    steps = recipe.training.total_steps
    values = {name: value for entry in entries for name, value in entry.items()}
    step = int(values["step"]) if "step" in values else None
    is_trained = checkpoint is not None and read_checkpoint_manifest(checkpoint).step == steps
    missing = unrecorded_at(recipe, steps, folder) if is_trained else []
    is_finished = is_trained and not missing
    state = "finished" if is_finished else "unfinished"
    if missing:
        state += f", because {', '.join(missing)} of the last step are not recorded"
    if stage.name is not None:
        state = f"stage {stage.name} {state}"
    if not is_finished and "time" in values:
        state += f": last recorded {_duration(time.time() - values['time'])} ago"
    return Status(
        state=state,
        exit_status=0 if is_finished else 1,
        is_over=is_finished,
        run_dir=str(folder),
        step=step,
        steps=steps,
        seconds_left=_seconds_left(entries, step, steps),
        values=values,
        checkpoint=checkpoint,
    )


def _stages_beside(run_dir: Path) -> list[str]:
    """Return the stage names in the ledger of ``run_dir``'s parent; [] without attempts."""
    attempts = Ledger(run_dir.resolve().parent).attempts()
    return [Path(stage).name for stage in attempts[-1].stages] if attempts else []


def _current_stage(attempt: Attempt, heartbeat: Heartbeat | None) -> str | None:
    """Return the ``run_dir`` of an attempt's current stage; None if ``attempt.stages`` is empty.

    If the heartbeat names no stage, return the last stage with a checkpoint, or the first stage if
    none has a checkpoint.
    """
    if heartbeat is not None and heartbeat.run_dir in attempt.stages:
        return heartbeat.run_dir
    begun = [run_dir for run_dir in attempt.stages if CheckpointStore(Path(run_dir)).steps()]
    return begun[-1] if begun else next(iter(attempt.stages), None)


def _state(
    attempt: Attempt, heartbeat: Heartbeat | None, now: float, *, is_checked: bool
) -> tuple[str, int]:
    """Return the state of a job as a sentence, and the exit status of the command.

    ``is_checked`` is True if the preflight checks of the attempt are done.
    """
    name = f"attempt {attempt.number}"
    if attempt.cause == Cause.FINISHED:
        return f"finished with {name}", 0
    if attempt.is_over:
        kind = "a mistake" if attempt.cause == Cause.MISTAKE else f"{MAX_FAULTS} faults in a row"
        return f"ended by {kind} in {name}: {attempt.reason}", 2
    if attempt.cause is not None:
        ended = f"{name} ended ({attempt.cause}): {attempt.reason}"
        return f"waits for attempt {attempt.number + 1}; {ended}", 1
    heard, patience = attempt.began, attempt.startup_seconds
    if heartbeat is not None:
        heard, patience = heartbeat.time, attempt.step_seconds
    ago = f"last heartbeat {_duration(now - heard)} ago"
    if now - heard > patience:
        return f"{name} has disappeared or hangs: {ago}", 1
    if heartbeat is None:
        doing = "builds or loads the network" if is_checked else "starts"
    elif heartbeat.step == heartbeat.first_step:
        doing = f"runs the first step after step {heartbeat.step}, which can compile kernels"
    else:
        doing = "runs"
    return f"{name} {doing}: {ago}", 0


def _seconds_left(entries: Sequence[Entry], step: int | None, steps: int | None) -> float | None:
    """Estimate the remaining seconds from the newest entries of the metrics.

    Intervals whose steps took more than ten times the median are ignored. They probably contain a
    requeue.
    """
    marks = [
        (e["step"], e["time"]) for e in entries if "perf/tokens_per_second" in e and "time" in e
    ]
    # Each interval has a number of seconds and a number of steps.
    intervals = [
        (time_after - time_before, step_after - step_before)
        for (step_before, time_before), (step_after, time_after) in pairwise(marks)
        if step_after > step_before
    ]
    if step is None or steps is None or not intervals:
        return None
    median = sorted(seconds / count for seconds, count in intervals)[len(intervals) // 2]
    usable = [(seconds, count) for seconds, count in intervals if seconds <= 10 * median * count]
    seconds, count = (sum(each) for each in zip(*usable, strict=True))
    return (steps - step) * seconds / count


def print_status(status: Status, console: Console) -> None:
    """Print the status as lines, then the newest attempts as a table."""
    lines = [f"{status.run_dir}: {status.state}"]
    lines += [f"  {name:<16}{text}" for name, text in _properties(status)]
    if status.attempts:
        lines += ["", *_attempt_lines(status.attempts[-_SHOWN_ATTEMPTS:])]
    elif status.steps is not None:
        lines.append("  no ledger of attempts, because no launcher started the run")
    console.print(Text("\n".join(map(escape, lines))), soft_wrap=True)


def _attempt_lines(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Yield the lines of a table of attempts, with each reason on a line of its own."""
    rows = [("attempt", "began", "took", "nodes", "steps", "saved", "cause")]
    for attempt in attempts:
        is_known = attempt.last_step is not None
        rows.append(
            (
                str(attempt.number),
                f"{datetime.fromtimestamp(attempt.began):%Y-%m-%d %H:%M}",
                _duration(attempt.seconds),
                str(len(attempt.facts.nodes)),
                f"{attempt.first_step}-{attempt.last_step}" if is_known else "",
                str(attempt.saved) if attempt.cause else "",
                str(attempt.cause or "not ended"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    reasons = ["", *(attempt.reason for attempt in attempts)]
    for row, reason in zip(rows, reasons, strict=True):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(cells)}".rstrip()
        if reason:
            yield f"  {'':{widths[0]}}  why: {reason}"


def _properties(status: Status) -> list[tuple[str, str]]:
    values = status.values
    progress = "none yet"
    if status.step is not None and status.steps is not None:
        share = 100 * status.step / status.steps
        progress = f"{status.step} of {status.steps} ({share:.1f}%)"
    left = status.seconds_left
    checkpoint = "none" if status.checkpoint is None else str(status.checkpoint)
    lines = [
        *_stage_lines(status),
        ("step", progress),
        *(
            []
            if status.step is not None and status.step == status.steps
            else [("left", "unknown" if left is None else f"{_duration(left)} of training")]
        ),
        ("tokens/s", _value(values, "perf/tokens_per_second", ",.0f")),
        ("loss", _value(values, "train/loss", ".4f")),
        ("held-out loss", _value(values, "valid/loss", ".4f")),
        ("checkpoint", checkpoint),
    ]
    if status.job is not None:
        number = shorten(status.job)
        lines.append(("job", f"{number}; squeue --jobs={number} shows it until it ends"))
    if status.attempts:
        lines.append(("faults in a row", f"{status.attempts[-1].faults} of {MAX_FAULTS}"))
    if status.suspects:
        hosts = ", ".join(f"{host} ({count})" for host, count in status.suspects.items())
        lines.append(("blamed hosts", hosts))
    if status.stragglers:
        lines.append(("slow hosts", ", ".join(status.stragglers)))
    return lines


def _stage_lines(status: Status) -> list[tuple[str, str]]:
    stages = [*status.attempts[-1].stages] if status.attempts else []
    if len(stages) < 2 or status.run_dir not in stages:
        return []
    place = stages.index(status.run_dir) + 1
    return [("stage", f"{Path(status.run_dir).name}, {place} of {len(stages)}")]


def _value(values: dict[str, float], name: str, form: str) -> str:
    return format(values[name], form) if name in values else "none yet"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
