"""The training run: the loop, and nothing else."""

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.contents import BEGINNING, RECIPE, Checkpoint, Position
from diffmegatron.config.load import dump_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.data.tokenizers import check_vocabulary, load_tokenizer
from diffmegatron.files import write_durably
from diffmegatron.model.build import build_model
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.guard import Action, Guard, StepDecision
from diffmegatron.optim.schedule import learning_rate
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import ParallelState, process_groups
from diffmegatron.training.compute.agreement import AgreedDecision, Agreement, agree
from diffmegatron.training.compute.batches import on_this_rank, open_loader, verify_sources
from diffmegatron.training.compute.step import forward_backward, forward_only
from diffmegatron.training.monitoring.evaluators import HELD_OUT, Evaluator, held_out_loss, measure
from diffmegatron.training.monitoring.metrics import MetricsWriter
from diffmegatron.training.monitoring.observations import lambdas, peak_memory
from diffmegatron.training.monitoring.progress import Progress, say
from diffmegatron.training.monitoring.records import dispensable
from diffmegatron.training.monitoring.stragglers import PhaseClock
from diffmegatron.training.saving.continuation import load_weights, open_start
from diffmegatron.training.saving.resume import (
    load_snapshot,
    mixture_change,
    return_point,
    starting_checkpoint,
)
from diffmegatron.training.saving.saver import Saver
from diffmegatron.training.supervision.events import stopped_by_guard, write_event
from diffmegatron.training.supervision.logits import largest_logits
from diffmegatron.training.supervision.run_lock import refuse_a_file, run_lock
from diffmegatron.training.supervision.signals import StopRequest
from diffmegatron.training.supervision.watchdog import Watchdog

log = logging.getLogger(__name__)


def train(
    recipe: Recipe, record: RankRecord | None = None, evaluators: Sequence[Evaluator] = ()
) -> bool:
    """Run a recipe on the ranks the launcher started, or on this process alone.

    Writes ``run_dir`` with ``recipe.yaml``, ``metrics.jsonl``, ``tensorboard/``, ``checkpoints/``
    and, if there is cause, ``events/`` and ``stacks/``; goes on from the newest good checkpoint
    there if the recipe says so.

    Args:
        recipe: of the run.
        record: is told every step.
        evaluators: of ``training.evaluate``.

    Returns:
        Whether the run is finished; otherwise it was asked to stop, and has saved.

    Raises:
        UserError: the recipe, the data, the layout or a checkpoint do not fit, the guard stopped
            the run, ``run_dir`` was removed or the last save failed.
    """
    launch, record = read_launch(), record or RankRecord()
    recipe.data_parallel(launch.ranks)
    used = load_tokenizer(recipe.data.tokenizer).vocab_size
    check_vocabulary(recipe.data.tokenizer, used, recipe.model.tokens)
    run_dir = Path(recipe.run_dir)
    with suppress(OSError):  # of a path that can be none: the lock says what is wrong with it
        refuse_a_file(run_dir)
    with (
        run_lock(run_dir) if launch.rank == 0 else nullcontext(),
        StopRequest(recipe.checkpoint.time_limit_margin) as stop,
        Watchdog(recipe.watchdog, record.folder or run_dir) as watchdog,
        process_groups(recipe.parallel, recipe.training.seed) as parallel_state,
        ExitStack() as stack,
    ):
        return Trainer(recipe, parallel_state, stop, watchdog, stack, record, evaluators).run()


class Trainer:
    """One rank's part of a run."""

    def __init__(
        self,
        recipe: Recipe,
        parallel_state: ParallelState,
        stop: StopRequest,
        watchdog: Watchdog,
        stack: ExitStack,
        record: RankRecord,
        evaluators: Sequence[Evaluator] = (),
    ) -> None:
        assert len(evaluators) == len(recipe.training.evaluate), "training.evaluate is not open"
        self.recipe, self.parallel_state = recipe, parallel_state
        self.evaluators = [*held_out_loss(recipe), *evaluators]
        self.stop, self.watchdog, self.record = stop, watchdog, record
        self.store = CheckpointStore(Path(recipe.run_dir))
        verify_sources(recipe.data, parallel_state, watchdog.patience)
        start = starting_checkpoint(self.store, recipe, parallel_state)
        self.network = build_model(recipe, parallel_state)
        self.shards = parameter_shards(self.network)
        self.engine = stack.enter_context(ZeroEngine(self.network, recipe, parallel_state))
        self.guard = Guard(recipe.guard)
        position = self._begin() if start is None else self._resume(start)
        if position.guard is not None:
            self.guard.restore(position.guard)
        self._stand_at(position.step)
        self.stopping = False
        # Why the present weights may be no good; None while the last step was finite.
        self.unsound: str | None = None
        # Of the checkpoint that the last rollback went to: as many now, and it was of no use.
        self.updates_returned_to: int | None = None
        saved_step = None if start is None else self.step
        self.saver = Saver(self.store, self.engine, self.shards, recipe, parallel_state, saved_step)
        self.loader = stack.enter_context(
            open_loader(recipe, parallel_state, "train", position.data)
        )
        if parallel_state.is_main and (
            change := mixture_change(position.data, self.loader.state())
        ):
            say(change)
        self.metrics = self._open_metrics(stack)
        self.clock = PhaseClock()
        self.progress = self._new_progress()

    def run(self) -> bool:
        """From the present step to the last one; returns whether that was reached."""
        training = self.recipe.training
        if self.step == 0:
            self._evaluate(last=False)
        while self.step < training.total_steps and not self.stopping:
            values = self._train_step()
            last = self.step == training.total_steps
            if self.step % training.log_interval == 0 or last:
                self._log(values)
            self._evaluate(last=last)
            if self.step % self.recipe.checkpoint.interval == 0 or self.saver.is_due_again:
                self._save()
        self._save_at_the_end()
        self.saver.wait()
        return self.step == training.total_steps

    def _train_step(self) -> dict[str, float]:
        """One global batch: its update, or what the guard makes of it instead."""
        recipe, parallel_state = self.recipe, self.parallel_state
        rate = learning_rate(self.step + 1, recipe.training.total_steps, recipe.optimizer)
        multipliers = recipe.optimizer.lr_multipliers
        with self.clock("data"):
            microbatches = on_this_rank(next(self.loader), parallel_state)
        with self.clock("forward_backward"):
            loss = forward_backward(
                self.engine,
                microbatches,
                parallel_state,
                offload_activations=recipe.training.offload_activations,
            )
        deciding = AgreedDecision(self.guard, partial(self._agree, loss))
        with self.clock("update"):
            self.engine.step(rate, deciding.allow)
        self._stand_at(self.step + 1)
        self.clock.step_done()
        self.watchdog.progress()
        agreed, decision = deciding.result
        self.unsound = None if decision.finite else decision.reason
        # After a step that is not finite the run goes on: what it ends with must be sound.
        self.stopping = agreed.stop and decision.finite
        self.saver.step_decided(finite=decision.finite)
        if self.saver.is_ready and not agreed.writing:
            self._close_save()
        if decision.reason is not None:
            self._report(agreed, decision)
        if decision.action is Action.STOP:
            self._give_up(decision)
        if decision.action is Action.ROLL_BACK:
            self._roll_back(decision)
        return {
            "train/loss": agreed.loss,
            "train/grad_norm": agreed.gradient_norm,
            "train/lr": rate,
            **{f"train/lr/{pattern}": rate * f for pattern, f in multipliers.items()},
        }

    def _agree(self, loss: Tensor, gradient_norm: Tensor | float = 0.0) -> Agreement:
        return agree(
            loss,
            gradient_norm,
            stop=self.stop.pending,
            writing=self.saver.is_writing,
            parallel_state=self.parallel_state,
        )

    def _report(self, agreed: Agreement, decision: StepDecision) -> None:
        last_sample = self.loader.consumed_samples - 1
        event = {
            "loss": agreed.loss,
            "gradient_norm": agreed.gradient_norm,
            "first_sample": last_sample + 1 - self.recipe.training.global_batch_size,
            "last_sample": last_sample,
            "lambda": lambdas(self.network, self.parallel_state),
        }
        run_dir = Path(self.recipe.run_dir)
        norms, logits = self.engine.held_gradient_norms(), self._largest_logits()
        write_event(
            run_dir, self.step, decision, event, norms, logits, self.shards, self.parallel_state
        )

    def _largest_logits(self) -> dict[int, float]:
        """Of the last batch, with the present weights: after the update if it was applied."""
        if self.parallel_state.context_size > 1:
            return {}  # a rank's queries see the other ranks' keys inside the kernels only
        with self._pause():
            return largest_logits(self.network, lambda: self._forward(self._last_batch()))

    def _last_batch(self) -> list[Batch]:
        size = self.recipe.training.global_batch_size
        return self.loader.read_step(max(0, self.loader.consumed_samples - size))

    def _give_up(self, decision: StepDecision) -> NoReturn:
        self._close_save()
        newest = self.store.latest()
        raise stopped_by_guard(self.recipe, self.step, decision, self.guard, newest)

    def _roll_back(self, decision: StepDecision) -> None:
        """Go back to the newest good checkpoint, and on with the data that comes now.

        So the batches since the checkpoint, the offending ones among them, are passed over.
        """
        with self._pause():
            self._close_save()
            self.saver.wait()
            no_progress = self.engine.updates == self.updates_returned_to
            checkpoint = return_point(self.store, self.parallel_state, no_progress=no_progress)
            if checkpoint is None:
                self._give_up(decision)
            position = self._resume(checkpoint)
            assert position.guard is not None
            self.guard.rolled_back(position.guard)
            self._stand_at(position.step)
            self.saver.saved_step = position.step
            self.updates_returned_to = position.updates
        if self.metrics is not None:
            self.metrics.rewind(self.step)
        self.progress = self._new_progress()

    def _log(self, values: dict[str, float]) -> None:
        values = values | {
            "perf/tokens_per_second": self.progress.tokens_per_second(self.step),
            "mem/peak_gib": peak_memory() / 2**30,
            "data/consumed_samples": self.loader.consumed_samples,
            "data/consumed_tokens": self.loader.consumed_tokens,
        }
        others = (
            lambdas(self.network, self.parallel_state)
            | self.guard.metrics()
            | self.clock.report(self.parallel_state)
        )
        self.record.reported(self.clock.slow_ranks)
        if self.metrics is not None:
            self.metrics.write(self.step, values | others)
            self.progress.line(self.step, values)

    def _evaluate(self, *, last: bool) -> None:
        """The held-out loss and the suites of ``training.evaluate``, where they are due."""
        due = [each for each in self.evaluators if last or self.step % each.every == 0]
        if not due or self.stopping:
            return
        with self._pause():
            values = measure(due, self.network, self.parallel_state, self._goes_on)
        self._write_metrics(values)
        if HELD_OUT in values:
            if self.parallel_state.is_main:
                say(f"held-out loss {values[HELD_OUT]:.4f} at step {self.step}")
            if not math.isfinite(values[HELD_OUT]):
                self.unsound = f"held-out loss is {values[HELD_OUT]}"

    def _goes_on(self) -> bool:
        """Whether nobody was asked to stop, after a part of an evaluation."""
        agreed = self._agree(torch.zeros((), device=self.parallel_state.device))
        self.stopping = agreed.stop and self.unsound is None
        self.watchdog.progress()
        self.record.at(self.step, self.recipe.run_dir)
        return not self.stopping

    def _forward(self, microbatches: Sequence[Batch]) -> Agreement:
        """The loss of a global batch with the present weights, and nothing changed."""
        self.network.eval()
        batch = on_this_rank(microbatches, self.parallel_state)
        agreed = self._agree(forward_only(self.network, batch, self.parallel_state))
        self.network.train()
        return agreed

    def _save(self) -> None:
        """Begin to save, and wait for the writing if the recipe does not save asynchronously."""
        with self._pause():
            self._close_save()
            self._write_metrics(self.saver.start(self._position()))
            if not self.recipe.checkpoint.asynchronous:
                self.saver.wait()

    def _close_save(self) -> None:
        with self.watchdog.patience():
            self._write_metrics(self.saver.close())

    def _save_at_the_end(self) -> None:
        """Save the last step unless it is saved, and wait until that counts."""
        if self.saver.saved_step == self.step:
            return
        with self._pause():
            self._check_sound()
            self.saver.step_decided(finite=True)
            self._close_save()
            if self.saver.saved_step != self.step:
                self._write_metrics(self.saver.save_now(self._position()))
        if self.stopping and self.parallel_state.is_main:
            say(f"asked to stop: saved step {self.step}; the same command goes on from there")

    def _check_sound(self) -> None:
        """Refuse to end with weights that the last update has wrecked: no later step would tell."""
        if self.unsound is None and not math.isfinite(self._forward(self._last_batch()).loss):
            self.unsound = "loss of the last batch after its update is not finite"
        if self.unsound is not None:
            self._give_up(StepDecision(False, Action.STOP, self.unsound, finite=False))

    def _stand_at(self, step: int) -> None:
        self.step = step
        self.network.at_step(step)
        self.record.at(step, self.recipe.run_dir)

    def _position(self) -> Position:
        return Position(self.step, self.engine.updates, self.loader.state(), self.guard.state())

    def _begin(self) -> Position:
        """The beginning of a new run, with another's weights if the recipe says so."""
        source = open_start(self.recipe, self.parallel_state)
        if source is not None:
            if self.parallel_state.is_main:
                say(f"starting with the weights of {source.directory}")
            load_weights(source, self.recipe, self.engine, self.shards)
        return BEGINNING

    def _resume(self, start: Checkpoint) -> Position:
        if self.parallel_state.is_main:
            say(f"resuming from {start.directory}")
        return load_snapshot(start, self.engine, self.shards, self.parallel_state)

    def _write_metrics(self, values: Mapping[str, float]) -> None:
        if self.metrics is not None and values:
            self.metrics.write(self.step, values)

    def _new_progress(self) -> Progress:
        training = self.recipe.training
        return Progress(self.step, training.total_steps, training.tokens_per_step)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Time that is not training, kept out of the speed."""
        started = time.perf_counter()
        with self.watchdog.patience():
            yield
        self.progress.skip(time.perf_counter() - started)

    def _open_metrics(self, stack: ExitStack) -> MetricsWriter | None:
        if not self.parallel_state.is_main:
            return None
        run_dir = Path(self.recipe.run_dir)
        with dispensable(run_dir / RECIPE):
            write_durably(run_dir / RECIPE, dump_recipe(self.recipe).encode())
        # As often as a run starts at step 0 it evaluates there: what it recorded before goes.
        last_step = self.step if self.step > 0 else -1
        return stack.enter_context(MetricsWriter(run_dir, last_step))
