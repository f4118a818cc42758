"""``diffmegatron status``: how far a job of many attempts is, for a person and for cron."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.attempts.decision import Cause
from diffmegatron.attempts.ends import Heartbeat, read_heartbeat
from diffmegatron.attempts.ledger import MAX_FAULTS, Attempt, Ledger, suspects
from diffmegatron.checkpoint.checkpoint_manifest import read_manifest
from diffmegatron.checkpoint.checkpoint_store import RECIPE, CheckpointStore
from diffmegatron.checkpoint.stage_folders import one_end, stage_folders
from diffmegatron.config.load import load_resolved
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, read_text, shown
from diffmegatron.operations.sbatch_file import JOB_NUMBER, JOB_RECIPE
from diffmegatron.training.monitoring.due import unrecorded_at
from diffmegatron.training.monitoring.metrics import Entry, newest_entries

_SHOWN_ATTEMPTS = 12
_MAX_NUMBER_BYTES = 100


@dataclass(frozen=True)
class Status:
    """How far a job is.

    Attributes:
        state: in one sentence.
        exit_status: 0: it runs, or is finished. 1: it waits for its first or next attempt, or has
            disappeared. 2: it is over, and a person has to look.
        is_over: nothing follows by itself; a run without a ledger may go on until it is done.
        run_dir: of the present stage.
        step: that was reached; None: none yet.
        steps: of the run or stage; None: no recipe of it has been read yet.
        seconds_left: of the run or stage, at the speed of the newest metrics; None: not known.
        values: the newest of every metric.
        checkpoint: the newest one of the run or stage; None: there is none.
        attempts: the ledger; empty: no launcher has started the run.
        suspects: hosts, and how many of the last attempts they failed or slowed down.
        stragglers: hosts that slow down the newest attempt.
    """

    state: str
    exit_status: int
    is_over: bool
    run_dir: str
    step: int | None
    steps: int | None
    seconds_left: float | None
    values: dict[str, float]
    checkpoint: Path | None
    attempts: tuple[Attempt, ...]
    suspects: dict[str, int]
    stragglers: tuple[str, ...]


def examine(run_dir: Path) -> Status:
    """Read all of it from ``run_dir``; nothing is asked of Slurm.

    Raises:
        UserError: there has been no attempt, and there is no run.
    """
    ledger = Ledger(run_dir)
    attempts = ledger.attempts()
    if not attempts and run_dir.resolve().name in _stages_beside(run_dir):
        raise UserError(f"{shown(run_dir)} is a stage of {shown(run_dir.parent)}; give that")
    submitted = _submitted(run_dir, attempts)
    if not attempts:
        if submitted is not None:
            return _not_begun(run_dir, submitted)
        return _of_chain(run_dir) or _without_ledger(run_dir)
    last = attempts[-1]
    heartbeat = read_heartbeat(ledger.folder(last.number))
    stage = _present_stage(last, heartbeat) or str(run_dir)
    steps = last.stages.get(stage)
    entries = newest_entries(Path(stage))
    state, exit_status = _state(last, heartbeat, time.time())
    if submitted is not None:
        state, exit_status = f"{_waits(submitted)}; before it: {state}", 1
    values = {name: value for entry in entries for name, value in entry.items()}
    step = heartbeat.step if heartbeat is not None else None
    if step is None and "step" in values:
        step = int(values["step"])
    return Status(
        state=state,
        exit_status=exit_status,
        is_over=last.is_over and submitted is None,
        run_dir=stage,
        step=step,
        steps=steps,
        seconds_left=_seconds_left(entries, step, steps),
        values=values,
        checkpoint=CheckpointStore(Path(stage)).latest(),
        attempts=tuple(attempts),
        suspects=suspects(attempts),
        stragglers=last.hosts_of(heartbeat.stragglers) if heartbeat is not None else (),
    )


def _submitted(run_dir: Path, attempts: Sequence[Attempt]) -> str | None:
    """The number of the newest job that ``launch`` has submitted, if it has made no attempt yet.

    Raises:
        UserError: its number cannot be read.
    """
    path = run_dir / JOB_NUMBER
    if not path.exists():
        return None
    number = read_text(path, max_bytes=_MAX_NUMBER_BYTES).strip()
    return None if number in {attempt.facts.job for attempt in attempts} else number


def _waits(number: str) -> str:
    return f"job {clipped(number)} has not started: it waits in the queue or was cancelled there"


def _not_begun(run_dir: Path, number: str) -> Status:
    """The status of a job without an attempt."""
    return Status(
        state=_waits(number),
        exit_status=1,
        is_over=False,
        run_dir=str(run_dir),
        step=None,
        steps=None,
        seconds_left=None,
        values={},
        checkpoint=CheckpointStore(run_dir).latest(),
        attempts=(),
        suspects={},
        stragglers=(),
    )


def _of_chain(run_dir: Path) -> Status | None:
    """The status of the first stage that is not finished, of those with a job each, or of the last.

    Returns:
        None where the stages of ``run_dir`` are no jobs of their own.

    Raises:
        UserError: what a stage has left cannot be read.
    """
    try:
        stages = stage_folders(run_dir, JOB_RECIPE, recipe=JOB_RECIPE)
    except UserError:
        return None
    found = None
    for place, stage in enumerate(stages, 1):
        if stage.name is None:
            return None
        found = examine(stage.run_dir)
        found = replace(found, state=f"stage {stage.name}, {place} of {len(stages)}: {found.state}")
        if not found.is_over or found.exit_status != 0:
            break
    return found


def _without_ledger(run_dir: Path) -> Status:
    """What a run that plain ``train`` has started says of itself, with stages the last begun.

    Raises:
        UserError: there is no run, or several stages are last.
    """
    stage = one_end(stage_folders(run_dir, RECIPE))
    folder = stage.run_dir
    entries, checkpoint = newest_entries(folder), CheckpointStore(folder).latest()
    recipe = load_resolved(folder / RECIPE)
    steps = recipe.training.total_steps
    values = {name: value for entry in entries for name, value in entry.items()}
    step = int(values["step"]) if "step" in values else None
    is_trained = checkpoint is not None and read_manifest(checkpoint).step == steps
    missing = unrecorded_at(recipe, steps, folder) if is_trained else []
    is_finished = is_trained and not missing
    state = "finished" if is_finished else "unfinished"
    if missing:
        state += f", as {', '.join(missing)} of the last step are not recorded"
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
        attempts=(),
        suspects={},
        stragglers=(),
    )


def _stages_beside(run_dir: Path) -> list[str]:
    """The stages of the job in whose ``run_dir`` a folder stands."""
    attempts = Ledger(run_dir.resolve().parent).attempts()
    return [Path(stage).name for stage in attempts[-1].stages] if attempts else []


def _present_stage(attempt: Attempt, heartbeat: Heartbeat | None) -> str | None:
    """The ``run_dir`` of the stage that an attempt is at; None: it could read no recipe."""
    if heartbeat is not None and heartbeat.run_dir in attempt.stages:
        return heartbeat.run_dir
    begun = [run_dir for run_dir in attempt.stages if CheckpointStore(Path(run_dir)).steps()]
    return begun[-1] if begun else next(iter(attempt.stages), None)


def _state(attempt: Attempt, heartbeat: Heartbeat | None, now: float) -> tuple[str, int]:
    name = f"attempt {attempt.number}"
    if attempt.cause == Cause.FINISHED:
        return f"finished with {name}", 0
    if attempt.is_over:
        kind = "a mistake" if attempt.cause == Cause.MISTAKE else f"{MAX_FAULTS} faults in a row"
        return f"ended by {kind} in {name}: {attempt.reason}", 2
    if attempt.cause is not None:
        return f"waits for the attempt after {attempt.number}, {attempt.cause}: {attempt.reason}", 1
    heard, patience = attempt.began, attempt.startup_seconds
    if heartbeat is not None:
        heard, patience = heartbeat.time, attempt.step_seconds
    ago = f"last heard of {_duration(now - heard)} ago"
    if now - heard > patience:
        return f"{name} has disappeared or hangs: {ago}", 1
    return f"{name} {'runs' if heartbeat else 'starts'}: {ago}", 0


def _seconds_left(entries: Sequence[Entry], step: int | None, steps: int | None) -> float | None:
    """By the newest entries without a gap that is longer than ten of their usual ones."""
    marks = [(e["step"], e["time"]) for e in entries if "train/loss" in e and "time" in e]
    paces = [
        (time_after - time_before) / (step_after - step_before)
        for (step_before, time_before), (step_after, time_after) in pairwise(marks)
        if step_after > step_before
    ]
    if step is None or steps is None or not paces:
        return None
    usual = sorted(paces)[len(paces) // 2]
    # A requeue lies between two entries as well.
    usable = [pace for pace in paces if pace <= 10 * usual]
    return (steps - step) * sum(usable) / len(usable)


def print_status(status: Status, console: Console) -> None:
    """As lines and a table of the newest attempts."""
    console.print(Text(f"{status.run_dir}: {status.state}"), soft_wrap=True)
    for name, text in _lines(status):
        console.print(Text(f"  {name:<16}{text}"), soft_wrap=True)
    if not status.attempts:
        if status.steps is not None:
            told = "no ledger of attempts, as no launcher has started it"
            console.print(f"  {told}", highlight=False)
        return
    table = Table("attempt", "began", "took", "nodes", "steps", "saved", "cause", "why")
    for attempt in status.attempts[-_SHOWN_ATTEMPTS:]:
        steps = "" if attempt.last_step is None else f"{attempt.first_step}-{attempt.last_step}"
        table.add_row(
            str(attempt.number),
            f"{datetime.fromtimestamp(attempt.began):%Y-%m-%d %H:%M}",
            _duration(attempt.seconds),
            str(len(attempt.facts.nodes)),
            steps,
            str(attempt.saved) if attempt.cause else "",
            str(attempt.cause or "not ended"),
            Text(attempt.reason),
        )
    console.print(table)


def _lines(status: Status) -> list[tuple[str, str]]:
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
        ("left", "not known" if left is None else f"{_duration(left)} of running"),
        ("tokens/s", _value(values, "perf/tokens_per_second", ",.0f")),
        ("loss", _value(values, "train/loss", ".4f")),
        ("held-out loss", _value(values, "valid/loss", ".4f")),
        ("checkpoint", checkpoint),
    ]
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
