"""The built-in hooks of a run.

A *finite* step has a finite loss and gradient norm.
"""

import math
import resource
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from diffmegatron.config.schema import Recipe
from diffmegatron.config.training_config import ProfileConfig
from diffmegatron.model.accounting.mfu import mfu_metric
from diffmegatron.optim.guard import Action
from diffmegatron.parallel.parallel_state import from_rank_0
from diffmegatron.training.compute.agreement import lambdas, largest_logits
from diffmegatron.training.guard_hook import GuardHook, give_up
from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.due import HELD_OUT, TEST, due_at, unrecorded_at
from diffmegatron.training.monitoring.evaluators import Evaluator, measure, split_losses
from diffmegatron.training.monitoring.progress import print_line
from diffmegatron.training.monitoring.records import log_write_errors
from diffmegatron.training.run import Run
from diffmegatron.training.safeguards import check_progress

PROFILE = "profile"
# Maximum number of allocations and frees in torch's memory history.
_MAX_ALLOCATIONS = 1_000_000
_PRINTED = {HELD_OUT: "held-out loss", TEST: "test loss"}


def builtin_hooks(recipe: Recipe, evaluators: Sequence[Evaluator]) -> list[Hook]:
    """Return the built-in hooks of a run, in the order of their calls.

    ``FinishSaveHook`` must record the step before a rollback by ``GuardHook`` ends the open save.
    All other hooks come after ``GuardHook``, because a rollback changes ``run.step``.
    """
    assert len(evaluators) == len(recipe.training.evaluate), "one evaluator per entry is needed"
    config = recipe.training.profile
    return [
        FinishSaveHook(),
        GuardHook(),
        MetricsHook(),
        EvaluationHook([*split_losses(recipe), *evaluators]),
        BeginSaveHook(),
        *([] if config is None else [ProfileHook(config)]),
    ]


class FinishSaveHook(Hook):
    """Completes a save when a later step was finite and every rank has written its file."""

    @override
    def after_step(self, run: Run) -> None:
        run.saver.step_decided(finite=run.decision.finite)
        if run.saver.is_ready and not run.agreed.writing:
            run.complete_or_drop_save()


class MetricsHook(Hook):
    """Records metrics and prints a line, every ``training.log_interval`` steps and at the end."""

    @override
    def after_step(self, run: Run) -> None:
        if run.decision.action is Action.ROLL_BACK:
            return  # run.values are those of a later step than run.step.
        if run.step % run.recipe.training.log_interval and not run.is_at_last_step:
            return
        speed = run.progress.tokens_per_second(run.step)
        values = run.values | {
            "perf/tokens_per_second": speed,
            **mfu_metric(run.recipe, run.parallel_state.world_size, speed, _gpu_name()),
            "mem/peak_gib": _peak_memory() / 2**30,
            "data/consumed_samples": run.loader.consumed_samples,
            "data/consumed_tokens": run.loader.consumed_samples * run.recipe.training.seq_length,
        }
        others = (
            lambdas(run.network, run.parallel_state)
            | largest_logits(run.largest_logits, run.recipe.model.num_layers, run.parallel_state)
            | run.guard.metrics()
            | run.clock.report(run.parallel_state)
            | run.source_losses.report()
        )
        run.rank_record.add_report(run.clock.slow_ranks)
        run.write_metrics(values | others)
        if run.parallel_state.is_main:
            run.progress.print_step(run.step, values)


def _peak_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


class EvaluationHook(Hook):
    """Evaluates held-out losses and the suites of ``training.evaluate`` when they are due.

    At a start or resume, those that have a recorded value at the current step are skipped.
    """

    def __init__(self, evaluators: Sequence[Evaluator]) -> None:
        self._evaluators = evaluators

    @override
    def before_training(self, run: Run) -> None:
        run_dir = Path(run.recipe.run_dir)  # Only rank 0 reads this folder.
        self._evaluate(run, from_rank_0(lambda: unrecorded_at(run.recipe, run.step, run_dir)))

    @override
    def after_step(self, run: Run) -> None:
        self._evaluate(run, due_at(run.recipe, run.step))

    def _evaluate(self, run: Run, names: Collection[str]) -> None:
        due = {each.name: each for each in self._evaluators if each.name in names}
        run.pending_evaluators = tuple(due)
        if not due or run.stopping:
            return
        with run.pause():
            found = measure(
                due.values(), run.network, run.parallel_state, lambda: _should_continue(run)
            )
        run.pending_evaluators = tuple(name for name in due if name not in found)
        values = {name: value for each in found.values() for name, value in each.items()}
        run.write_metrics(values)
        for name, title in _PRINTED.items():
            if name in values and run.parallel_state.is_main:
                print_line(f"{title} {values[name]:.4f} at step {run.step}")
            if not math.isfinite(values.get(name, 0.0)):
                run.broken_reason = f"{title} is {values[name]}"


def _should_continue(run: Run) -> bool:
    """Return whether an evaluation continues, equal on every rank; restart the watchdog's timer."""
    agreed = run.agree()
    # While the weights may be broken, a stop would end the run with an error, so do not stop.
    run.stopping = agreed.stop and run.broken_reason is None
    run.watchdog.restart_timer()
    run.rank_record.set_step(run.step, run.recipe.run_dir)
    return not run.stopping


class BeginSaveHook(Hook):
    """Begins a save every ``checkpoint.interval`` steps, and saves at the end of the run.

    A failed save is retried as long as ``Saver.should_retry`` is True.
    """

    @override
    def after_step(self, run: Run) -> None:
        checkpoint = run.recipe.checkpoint
        if run.step % checkpoint.interval and not run.saver.should_retry:
            return
        with run.pause():
            run.complete_or_drop_save()
            run.write_metrics(run.saver.start(run.position()))
            if not checkpoint.asynchronous:
                run.saver.wait()

    @override
    def after_training(self, run: Run) -> None:
        # An evaluation in a restarted run can find that the saved weights are broken.
        if run.saver.saved_step != run.step or run.broken_reason is not None:
            with run.pause():
                # No later step shows whether the last update broke the weights, so test them.
                if run.broken_reason is None and not run.is_last_batch_finite():
                    run.broken_reason = "loss of the last batch after its update is not finite"
                if run.broken_reason is not None:
                    give_up(run, run.broken_reason)
                run.saver.step_decided(finite=True)
                run.complete_or_drop_save()
                if run.saver.saved_step != run.step:
                    run.write_metrics(run.saver.save_now(run.position()))
        run.saver.wait()
        if not run.stopping or run.is_finished:
            return
        pending = ", ".join(run.pending_evaluators)
        first = f", first with {pending}" if pending else ""
        if run.step == run.first_step:
            before = f" before {pending}" if pending else ""
            from_rank_0(lambda: _check_progress(run, f"step {run.step}{before}"))
        if run.parallel_state.is_main:
            print_line(
                f"stop requested: saved step {run.step}; the same command resumes from it{first}"
            )


def _check_progress(run: Run, progress: str) -> None:
    margin = run.recipe.checkpoint.time_limit_margin
    if run.stop.is_due_to_job_end(margin):
        check_progress(Path(run.recipe.run_dir), progress, margin)


class ProfileHook(Hook):
    """Traces the steps of ``training.profile`` with torch's profiler, into ``run_dir/profile``.

    Only the ranks ``training.profile.ranks`` write a trace. A run that resumes from step
    ``training.profile.start`` or later writes none.
    """

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._profile: profile | None = None
        self._is_done = False

    @override
    def before_training(self, run: Run) -> None:
        self._begin_if_due(run)

    @override
    def after_step(self, run: Run) -> None:
        if run.step + 1 >= self._config.start + self._config.steps:
            self._end(run)
        self._begin_if_due(run)

    @override
    def after_training(self, run: Run) -> None:
        self._end(run)

    def _begin_if_due(self, run: Run) -> None:
        is_here = run.parallel_state.rank in self._config.ranks
        if run.step + 1 != self._config.start or not is_here or self._profile or self._is_done:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        self._profile = profile(activities=activities)
        self._profile.start()

    def _end(self, run: Run) -> None:
        if self._profile is None:
            return
        folder = Path(run.recipe.run_dir) / PROFILE
        name = f"rank_{run.parallel_state.rank:05d}.step_{self._config.start:08d}"
        with run.pause(), log_write_errors(folder):
            self._profile.stop()
            folder.mkdir(exist_ok=True)
            if torch.cuda.is_available():
                torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            # TensorBoard's profiler plugin finds traces by this suffix.
            self._profile.export_chrome_trace(str(folder / f"{name}.pt.trace.json.gz"))
            print_line(f"wrote the trace of steps {self._config.start} to {run.step} into {folder}")
        self._profile, self._is_done = None, True
