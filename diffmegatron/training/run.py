"""The state of a training run on one rank, shared by the training loop and its hooks."""

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import Tensor

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.checkpoint.checkpoint_format import BEGINNING, RECIPE, Checkpoint, Position
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.stage_folders import earlier_recipes
from diffmegatron.config.load import dump_recipe
from diffmegatron.config.recipe_changes import changes_in_words, unscaled_extension
from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch, missing_labels_warning
from diffmegatron.files import HeldFolder, write_durably
from diffmegatron.model.build import build_model
from diffmegatron.model.layers.fp8 import begin_fp8
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.guard import Guard, StepDecision
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.launcher import LaunchEnvironment
from diffmegatron.parallel.parallel_state import ParallelState, errors_on_all_ranks
from diffmegatron.training.compute.agreement import Agreement, agree
from diffmegatron.training.compute.batches import on_this_rank, open_loader, verify_sources
from diffmegatron.training.compute.step import LossSum, forward_only
from diffmegatron.training.kernel_choice import with_chosen_kernels
from diffmegatron.training.monitoring.metrics import MetricsWriter
from diffmegatron.training.monitoring.progress import Progress, print_line
from diffmegatron.training.monitoring.records import log_write_errors
from diffmegatron.training.monitoring.source_losses import SourceLosses
from diffmegatron.training.monitoring.stragglers import PhaseClock
from diffmegatron.training.monitoring.wandb_writer import WandbWriter
from diffmegatron.training.safeguards import StopRequest, Watchdog
from diffmegatron.training.saving.resume import (
    load_snapshot,
    load_weights,
    mixture_change,
    open_start,
    starting_checkpoint,
)
from diffmegatron.training.saving.saver import Saver

log = logging.getLogger(__name__)


class Run:
    """The state of a training run on one rank.

    The constructor loads the newest intact checkpoint in ``run_dir``, or begins a new run.

    Attributes:
        recipe, parallel_state: the resolved recipe, and this rank's place in the layout.
        network: this rank's virtual pipeline stages of the model.
        engine, loader: the optimizer under ZeRO, and the training batches.
        step: number of the last completed step; 0 before the first step.
        first_step: step at which this start of the run began.
        values: metrics of the last completed step by name, equal on every rank: ``train/loss``,
            ``train/loss_tokens``, ``train/grad_norm``, ``train/lr``, with z-loss ``train/z_loss``,
            and with Muon ``train/lr_muon`` or with muP ``train/lr_matrices``. Without labels, loss
            and norm are missing.
        agreed: values of the last completed step, reduced over all ranks.
        largest_logits: this rank's largest attention logits in the first microbatch of the last
            completed step, from ``observed_logits``; empty if they were not observed.
        decision: decision of the guard on the last completed step.
        stopping: whether the run saves and ends after the hooks of this step; equal on every rank.
        pending_evaluators: names of the evaluators due at ``step`` that have no result yet.
        broken_reason: why the weights may be broken, such as "held-out loss is nan"; None if the
            last step and the evaluations after it were finite.
    """

    agreed: Agreement
    decision: StepDecision

    def __init__(
        self,
        recipe: Recipe,
        parallel_state: ParallelState,
        launch: LaunchEnvironment,
        stop: StopRequest,
        watchdog: Watchdog,
        exits: ExitStack,
        rank_record: RankRecord,
    ) -> None:
        self.recipe, self.parallel_state = recipe, parallel_state
        self.stop, self.watchdog, self.rank_record = stop, watchdog, rank_record
        self.store = CheckpointStore(Path(recipe.run_dir))
        verify_sources(recipe.data, parallel_state, watchdog.long_limit)
        start = starting_checkpoint(self.store, recipe, parallel_state)
        saved = None if start is None else start.recipe
        self.recipe = recipe = with_chosen_kernels(recipe, saved, parallel_state)
        if recipe.training.fp8 is not None:
            with errors_on_all_ranks():
                begin_fp8(recipe.training.fp8.recipe)
        self.network = build_model(recipe, parallel_state)
        self.shards = parameter_shards(self.network)
        self.engine = exits.enter_context(ZeroEngine(self.network, recipe, parallel_state))
        self.guard = Guard(recipe.guard)
        position = self._begin() if start is None else self.resume(start)
        if position.guard is not None:
            self.guard.restore(position.guard)
        self.set_step(position.step)
        self.first_step = position.step
        self.values: dict[str, float] = {}
        self.largest_logits: dict[int, Tensor] = {}
        self.stopping = False
        self.pending_evaluators: tuple[str, ...] = ()
        self.broken_reason: str | None = None
        saved_step = None if start is None else self.step
        held = None
        if parallel_state.is_main:
            held = exits.enter_context(HeldFolder(Path(recipe.run_dir)))
        self.saver = Saver(
            self.store, self.engine, self.shards, recipe, parallel_state, launch, saved_step, held
        )
        self.loader = exits.enter_context(
            open_loader(recipe, parallel_state, "train", position.data)
        )
        change = mixture_change(position.data, self.loader.state())
        if parallel_state.is_main:
            if change is not None:
                print_line(change)
            last = recipe.training.total_steps * recipe.training.global_batch_size
            warning = missing_labels_warning(
                self.loader.samples, self.loader.consumed_samples, last
            )
            if warning is not None:
                log.warning("%s", warning)
        self.metrics = self._open_metrics(exits)
        self.wandb = None
        if parallel_state.is_main and recipe.training.wandb is not None:
            self.wandb = exits.enter_context(WandbWriter(recipe, recipe.training.wandb))
        self.source_losses = SourceLosses(recipe.data, parallel_state)
        self.clock = PhaseClock()
        self.progress = Progress(self.step, recipe.training)

    @property
    def is_at_last_step(self) -> bool:
        """True if the last step of the recipe is completed."""
        return self.step >= self.recipe.training.total_steps

    @property
    def are_next_logits_observed(self) -> bool:
        """True if the largest attention logits of the next step are observed.

        They are observed in logged steps that are at least ten steps apart, and in the last step,
        because each observation computes the logits of a microbatch again. With context
        parallelism, a rank lacks the keys of other ranks.
        """
        training, step = self.recipe.training, self.step + 1
        interval = training.log_interval * math.ceil(10 / training.log_interval)
        is_due = step % interval == 0 or step >= training.total_steps
        return is_due and self.parallel_state.context_size == 1

    @property
    def is_finished(self) -> bool:
        """True if the last step is completed and every evaluation due at it has a result."""
        return self.is_at_last_step and not self.pending_evaluators

    def set_step(self, step: int) -> None:
        """Set the number of the last completed step, after a step or after loading a checkpoint."""
        self.step = step
        self.network.at_step(step)
        self.rank_record.set_step(step, self.recipe.run_dir)

    def position(self) -> Position:
        """Return step, update count, data position and guard state, to save in a checkpoint."""
        return Position(self.step, self.engine.updates, self.loader.state(), self.guard.state())

    def resume(self, checkpoint: Checkpoint) -> Position:
        """Load a checkpoint of this run, and return its position; every rank must call this."""
        if self.parallel_state.is_main:
            print_line(f"resuming from {checkpoint.directory}")
        return load_snapshot(checkpoint, self.engine, self.shards, self.parallel_state)

    def agree(self, loss: LossSum | None = None, gradient_norm: Tensor | float = 0.0) -> Agreement:
        """Reduce the values of :class:`Agreement` over all ranks; every rank must call this."""
        return agree(
            loss,
            gradient_norm,
            stop=self.stop.is_pending(self.recipe.checkpoint.time_limit_margin),
            writing=self.saver.is_writing,
            parallel_state=self.parallel_state,
        )

    def last_batch(self) -> list[Batch]:
        """Read this data-parallel rank's microbatches of the last step again, and return them."""
        size = self.recipe.training.global_batch_size
        return self.loader.read_step(max(0, self.loader.consumed_samples - size))

    def is_last_batch_finite(self) -> bool:
        """Return whether the loss of the last batch is finite; all ranks must call this."""
        self.network.eval()
        batch = on_this_rank(self.last_batch(), self.parallel_state)
        agreed = self.agree(forward_only(self.network, batch, self.parallel_state))
        self.network.train()
        return agreed.loss is None or math.isfinite(agreed.loss)

    def write_metrics(self, values: Mapping[str, float]) -> None:
        """Record metrics of the current step, by name; only rank 0 writes them."""
        for writer in (self.metrics, self.wandb):
            if writer is not None and values:
                writer.write(self.step, values)

    def rewind_metrics(self) -> None:
        """Drop the metrics of steps after ``self.step``, and restart the speed measurement."""
        if self.metrics is not None:
            self.metrics.rewind(self.step)
        self.source_losses.clear()
        self.progress = Progress(self.step, self.recipe.training)

    def complete_or_drop_save(self) -> None:
        """Call ``Saver.complete_or_drop`` inside ``Watchdog.long_limit``; all ranks call this."""
        with self.watchdog.long_limit():
            self.write_metrics(self.saver.complete_or_drop())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the context from the training speed; use ``Watchdog.long_limit`` in it."""
        started = time.perf_counter()
        with self.watchdog.long_limit():
            yield
        self.progress.skip(time.perf_counter() - started)

    def _begin(self) -> Position:
        source = open_start(self.recipe, self.parallel_state)
        if source is not None:
            if self.parallel_state.is_main:
                print_line(f"starting with the weights of {source.directory}")
                changes = changes_in_words(source.recipe, self.recipe)
                if changes is not None:
                    print_line(changes)
                warning = unscaled_extension(earlier_recipes(self.recipe), self.recipe)
                if warning is not None:
                    log.warning("%s", warning)
            load_weights(source, self.recipe, self.engine, self.shards)
        return BEGINNING

    def _open_metrics(self, exits: ExitStack) -> MetricsWriter | None:
        if not self.parallel_state.is_main:
            return None
        run_dir = Path(self.recipe.run_dir)
        with log_write_errors(run_dir / RECIPE):
            write_durably(run_dir / RECIPE, dump_recipe(self.recipe).encode())
        # A run without a checkpoint starts over, so drop all metrics of earlier starts (-1).
        last_step = -1 if self.saver.saved_step is None else self.step
        return exits.enter_context(MetricsWriter(run_dir, last_step))
