"""The training run: the loop, and nothing else."""

import logging
import math
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from diffmegatron.checkpoint.contents import (
    RECIPE,
    Checkpoint,
    check_same_run,
    open_checkpoint,
)
from diffmegatron.checkpoint.store import CheckpointStore
from diffmegatron.config.load import dump_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.documents import Split
from diffmegatron.data.loader import Batch, Loader
from diffmegatron.data.samples import open_samples
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from diffmegatron.model.build import build_model, lambda_by_layer
from diffmegatron.model.shards import parameter_shards
from diffmegatron.optim.schedule import learning_rate
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.topology import Topology, process_groups, world_size
from diffmegatron.training.metrics import MetricsWriter
from diffmegatron.training.progress import Progress, say
from diffmegatron.training.snapshot import Position, load_snapshot, save_snapshot
from diffmegatron.training.step import forward_backward, forward_only

log = logging.getLogger(__name__)


def train(recipe: Recipe) -> None:
    """Run a recipe on the ranks the launcher started, or on this process alone.

    Writes ``run_dir`` with ``recipe.yaml``, ``metrics.jsonl``, ``tensorboard/`` and
    ``checkpoints/``; goes on from the newest checkpoint there if the recipe says so.

    Raises:
        UserError: the recipe, the data, the layout or a checkpoint do not fit, or the loss is
            not finite.
    """
    recipe.data_parallel(world_size())
    check_vocabulary(recipe)
    store = CheckpointStore(Path(recipe.run_dir))
    start = _starting_checkpoint(store, recipe)
    with process_groups(recipe.parallel, recipe.training.seed) as topology, ExitStack() as stack:
        Trainer(recipe, topology, store, start, stack).run()


def check_vocabulary(recipe: Recipe) -> None:
    """Refuse a model whose embedding has no row for some of the tokenizer's ids.

    Raises:
        UserError: with both sizes.
    """
    used = load_tokenizer(recipe.data.tokenizer).vocab_size
    if used > recipe.model.vocab_size:
        raise UserError(
            f"model.vocab_size {recipe.model.vocab_size} is too small for the tokenizer "
            f"{recipe.data.tokenizer!r}, which uses {used} ids; give at least {used}, padded to a "
            "multiple of parallel.tensor"
        )


class Trainer:
    """One rank's part of a run."""

    def __init__(
        self,
        recipe: Recipe,
        topology: Topology,
        store: CheckpointStore,
        start: Checkpoint | None,
        stack: ExitStack,
    ) -> None:
        self.recipe, self.topology, self.store = recipe, topology, store
        self.network = build_model(recipe, topology)
        self.shards = parameter_shards(self.network)
        self.engine = ZeroEngine(self.network, recipe, topology)
        position = Position(0, None) if start is None else self._resume(start)
        self.step = position.step
        self.loader = stack.enter_context(self._loader("train", position.data))
        self.metrics = self._open_metrics(stack)
        total = recipe.training.total_steps
        self.progress = Progress(self.step, total, recipe.training.tokens_per_step)

    def run(self) -> None:
        """From the present step to the last one."""
        training = self.recipe.training
        if self.step == 0:
            self._evaluate()
        while self.step < training.total_steps:
            values = self._train_step()
            last = self.step == training.total_steps
            if self.step % training.log_interval == 0 or last:
                self._log(values)
            if self.step % training.eval_interval == 0 or last:
                self._evaluate()
            if self.step % self.recipe.checkpoint.interval == 0 or last:
                self._save()

    def _train_step(self) -> dict[str, float]:
        rate = learning_rate(self.step + 1, self.recipe.training.total_steps, self.recipe.optimizer)
        loss = forward_backward(self.engine, self._on_device(next(self.loader)), self.topology)
        value = loss.item()
        self._require_finite("loss", value)
        norm = self.engine.step(rate)
        self._require_finite("gradient norm", norm)
        self.step += 1
        return {"train/loss": value, "train/grad_norm": norm, "train/lr": rate}

    def _require_finite(self, name: str, value: float) -> None:
        if math.isfinite(value):
            return
        newest = self.store.latest()
        raise UserError(
            f"{name} is {value} at step {self.step + 1}; the run stopped without saving "
            f"(newest checkpoint: {newest.name if newest else 'none'}): lower optimizer.lr "
            f"{self.recipe.optimizer.lr:g} or lengthen optimizer.schedule.warmup_steps "
            f"{self.recipe.optimizer.schedule.warmup_steps}"
        )

    def _log(self, values: dict[str, float]) -> None:
        values = values | {
            "perf/tokens_per_second": self.progress.tokens_per_second(self.step),
            "mem/peak_gib": _peak_memory() / 2**30,
            "data/consumed_samples": self.loader.consumed_samples,
            "data/consumed_tokens": self.loader.consumed_tokens,
        }
        lambdas = self._lambdas()
        if self.metrics is not None:
            self.metrics.write(self.step, values | lambdas)
            self.progress.line(self.step, values)

    def _lambdas(self) -> dict[str, float]:
        """lambda of every layer of the whole network."""
        stages: list[dict[int, float]] = [{} for _ in range(self.topology.pipeline_size)]
        distributed.all_gather_object(
            stages, lambda_by_layer(self.network), group=self.topology.pipeline_group
        )
        layers = {layer: value for stage in stages for layer, value in stage.items()}
        return {f"attn/lambda_layer_{layer:02d}": layers[layer] for layer in sorted(layers)}

    def _evaluate(self) -> None:
        """Mean loss over the first global batches of the held-out documents."""
        training = self.recipe.training
        if training.eval_batches == 0:
            return
        with self._pause():
            self.network.eval()
            loader = self._loader("validation")
            batches = (
                loader.read_step(number * training.global_batch_size)
                for number in range(training.eval_batches)
            )
            losses = [
                forward_only(self.network, self._on_device(batch), self.topology).item()
                for batch in batches
            ]
            self.network.train()
        loss = sum(losses) / len(losses)
        if self.metrics is not None:
            self.metrics.write(self.step, {"valid/loss": loss})
            say(f"held-out loss {loss:.4f} at step {self.step}")

    def _save(self) -> None:
        with self._pause():
            position = Position(self.step, self.loader.state())
            path = save_snapshot(
                self.store, position, self.engine, self.shards, self.recipe, self.topology
            )
        if self.topology.is_main:
            say(f"saved {path}")

    def _resume(self, start: Checkpoint) -> Position:
        if self.topology.is_main:
            say(f"resuming from {start.directory}")
        return load_snapshot(start, self.engine, self.shards, self.topology)

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Time that is not training, kept out of the speed."""
        started = time.perf_counter()
        yield
        self.progress.skip(time.perf_counter() - started)

    def _loader(self, split: Split, state: Mapping[str, Any] | None = None) -> Loader:
        training = self.recipe.training
        samples = open_samples(self.recipe.data, training.seq_length, training.seed, split)
        return Loader(
            samples if state is None else samples.resumed(state),
            seq_length=training.seq_length,
            micro_batch_size=training.micro_batch_size,
            global_batch_size=training.global_batch_size,
            data_parallel_rank=self.topology.data_rank,
            data_parallel_size=self.topology.data_size,
            consumed_samples=int(state["consumed_samples"]) if state else 0,
        )

    def _on_device(self, microbatches: list[Batch]) -> list[Batch]:
        return [
            replace(
                batch,
                **{
                    field.name: value.to(self.topology.device, non_blocking=True)
                    for field in fields(batch)
                    if (value := getattr(batch, field.name)) is not None
                },
            )
            for batch in microbatches
        ]

    def _open_metrics(self, stack: ExitStack) -> MetricsWriter | None:
        if not self.topology.is_main:
            return None
        run_dir = Path(self.recipe.run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RECIPE).write_text(dump_recipe(self.recipe))
        return stack.enter_context(MetricsWriter(run_dir, self.step))


def _starting_checkpoint(store: CheckpointStore, recipe: Recipe) -> Checkpoint | None:
    """The checkpoint to go on from, or None for a new run.

    Raises:
        UserError: there are checkpoints but the recipe does not resume, or is another run's.
    """
    latest = store.latest()
    if latest is None:
        return None
    if not recipe.checkpoint.resume:
        raise UserError(
            f"{store.directory} holds checkpoints up to {latest.name} and checkpoint.resume is "
            "false; give another run_dir or move them away"
        )
    checkpoint = open_checkpoint(latest)
    check_same_run(checkpoint, recipe)
    return checkpoint


def _peak_memory() -> int:
    """Bytes: the device's peak allocation, or the process's peak resident size on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
