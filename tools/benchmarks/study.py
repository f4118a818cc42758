"""Run a study: train and evaluate many runs that one file describes, and report their measures.

    python -m tools.benchmarks study tools/benchmarks/studies/language_modelling.yaml --jobs 2

Each run is ``diffmegatron train`` of the study's recipe with overrides, then ``diffmegatron
evaluate``. The command can be interrupted and repeated: finished runs are skipped, and others
resume from their newest checkpoint. NAME is the name of the study's file without suffix. The folder
``--out`` gets NAME.jsonl with one line per finished run, and NAME.md and NAME.png with means and
95% intervals over seeds. If the study measures runs during training, it also gets NAME_along.png.
study_file.py describes the keys of a study's file, and docs/studies.md how to repeat the studies of
this repository.

``--repeat RUN`` trains and evaluates one finished run again, in another folder, and compares the
new line with the recorded one. It changes no result file.
"""

import argparse
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import format_path
from diffmegatron.training.monitoring.evaluators import HELD_OUT
from tools.benchmarks.study_file import Cell, PlannedRun, Study, load_study, wanted_runs
from tools.benchmarks.study_report import write_report
from tools.benchmarks.study_runs import Line, Lines, Runner, StoppedError, differences


def main(arguments: argparse.Namespace) -> None:
    """Run the unfinished runs of a study and write the report, or repeat one run."""
    study = load_study(arguments.study)
    name = arguments.study.stem
    lines = Lines(arguments.out / f"{name}.jsonl")
    recipe = arguments.study.parent / study.recipe
    if arguments.repeat is not None:
        work = (arguments.work / f"{name}_repeated").absolute()
        found = repeat(study, recipe, work, lines.by_run, arguments.repeat)
        if found:
            sys.exit("\n".join(found))
        print(f"{arguments.repeat}: all values are equal to the recorded ones; speed not compared")
        return
    if not arguments.report_only:
        cells = selected_cells(study, arguments.arms)
        work = (arguments.work / name).absolute()
        runner = Runner(study, recipe, work)
        with FileLock(work / "study.lock", f"study {format_path(work)}", "give another --work"):
            run_all(study, cells, runner, lines, arguments.jobs)
    write_report(study, lines.by_run, arguments.out / name)
    print((arguments.out / f"{name}.md").read_text())


def selected_cells(study: Study, arms: Sequence[str] | None) -> list[Cell]:
    """Return the cells of the named arms; None selects all arms.

    A cell is one arm (one choice of recipe keys) at one size of the model.

    Raises:
        UserError: If the study does not have a named arm.
    """
    for arm in arms or ():
        if arm not in study.arms:
            raise UserError(f"--arms names {arm!r}; the study has {', '.join(study.arms)}")
    return [cell for cell in study.cells if arms is None or cell.arm in arms]


def run_all(study: Study, cells: Sequence[Cell], runner: Runner, lines: Lines, jobs: int) -> None:
    """Finish all planned runs, ``jobs`` at a time; add the result line of each when it ends.

    Args:
        study: the study.
        cells: arms and sizes whose runs are planned.
        runner: trainer and evaluator of one run.
        lines: result lines of finished runs; new lines are added.
        jobs: maximum number of runs at a time.

    Raises:
        UserError: If runs failed; raised after the other runs have finished.
        SystemExit: If a signal stopped the study.
    """
    failed: dict[str, UserError] = {}
    running: dict[Future[Line], PlannedRun] = {}
    with ThreadPoolExecutor(jobs) as pool, stopped_by_signals(runner):
        while True:
            for run in missing_runs(study, cells, runner, lines):
                is_known = run.name in failed or run in running.values()
                if not is_known and len(running) < jobs:
                    print(f"running {run.name}", flush=True)
                    running[pool.submit(runner.finish, run)] = run
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                run = running.pop(future)
                try:
                    lines.add(future.result())
                    loss = lines.by_run[run.name]["measures"][HELD_OUT]
                    print(f"finished {run.name}: {HELD_OUT} {loss:.4f}", flush=True)
                except UserError as error:
                    failed[run.name] = error
                    print(f"error: {error}", file=sys.stderr, flush=True)
    if failed:
        raise UserError(f"{len(failed)} runs failed: {', '.join(failed)}")


@contextmanager
def stopped_by_signals(runner: Runner) -> Iterator[None]:
    """Context in which a signal stops the study: the running commands are stopped, and it exits.

    The signal is Ctrl-C or SIGTERM to this process, or one that stopped a single training or
    evaluation command.

    Raises:
        SystemExit: If a signal stopped the study.
    """
    # SIGTERM, from `kill` or a job's time limit, stops the study as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (KeyboardInterrupt, StoppedError):
        runner.stop()
        sys.exit("study stopped; run the same command again to continue")


def repeat(
    study: Study, recipe: Path, work: Path, by_run: Mapping[str, Line], name: str
) -> list[str]:
    """Train and evaluate a finished run again; return its differences from the recorded line.

    An interrupted repetition is resumed. When the repetition has finished, its folder is removed.

    Args:
        study: the study.
        recipe: path of the study's recipe.
        work: folder of the repetition.
        by_run: result lines of finished runs by name.
        name: name of the run to repeat.

    Raises:
        UserError: If the run has not finished; if its recorded line has other settings or another
            corpus than the study has now; or if a command failed.
        SystemExit: If a signal stopped the repetition.
    """
    losses = {run: line["measures"][HELD_OUT] for run, line in by_run.items()}
    planned = {run.name: run for run in wanted_runs(study, study.cells, losses)}
    if name not in planned or name not in by_run:
        finished = ", ".join(run for run in planned if run in by_run)
        raise UserError(f"--repeat names {name!r}; the finished runs are {finished or 'none'}")
    runner = Runner(study, recipe, work)
    runner.is_finished(planned[name], by_run[name])  # Raises for other settings.
    with FileLock(
        work.with_name(f"{work.name}.lock"), f"{format_path(work)}", "give another --work"
    ):
        with ThreadPoolExecutor(1) as pool, stopped_by_signals(runner):
            line = pool.submit(runner.finish, planned[name]).result()
        shutil.rmtree(work)
    return differences(by_run[name], line)


def missing_runs(
    study: Study, cells: Sequence[Cell], runner: Runner, lines: Lines
) -> list[PlannedRun]:
    """Return the planned runs that are not finished, in the order in which to run them.

    If another study has finished a run with the same settings, the run counts as finished, and its
    result line is added to ``lines``.
    """
    while True:
        losses = {name: line["measures"][HELD_OUT] for name, line in lines.by_run.items()}
        missing = [
            run
            for run in wanted_runs(study, cells, losses)
            if not runner.is_finished(run, lines.by_run.get(run.name))
        ]
        found = [runner.find_in_other_studies(run, lines.of_others) for run in missing]
        if not any(found):
            return missing
        for line in filter(None, found):
            print(f"took {line['run']} from another study", flush=True)
            lines.add(line)
