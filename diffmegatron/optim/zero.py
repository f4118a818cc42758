"""The ZeRO engine: DeepSpeed ZeRO around this rank's network.

Every layout uses ZeRO 1, 2 or 3, because ZeRO 0 is wrong in bf16 with tensor parallelism.
DeepSpeed's own checkpoints fit only one layout, so they are not used.
"""

import io
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, distributed

from diffmegatron.config.schema import Recipe
from diffmegatron.model.accounting.memory import REDUCE_BUCKET
from diffmegatron.model.network import Network
from diffmegatron.model.parameter_shards import parameter_shards
from diffmegatron.optim.adamw import MOMENTS, create_optimizer, decaying_rows
from diffmegatron.optim.flat_gradients import flat_gradients
from diffmegatron.optim.gradient_clipping import (
    accumulated_gradient,
    clipping_settings,
    local_gradient_norms,
    sum_norms_at_once,
)
from diffmegatron.optim.muon import flat_muon
from diffmegatron.optim.partition import (
    ExactValues,
    FrozenWeights,
    keep_own_gradients,
    partition_of,
)
from diffmegatron.optim.reduction import (
    GradientReduction,
    shared_parameters,
    sum_in_backward,
    sum_together,
)
from diffmegatron.parallel.engine_imports import importing_engines
from diffmegatron.parallel.parallel_state import ModelParallelUnit, ParallelState


@dataclass(frozen=True)
class Fragment:
    """A range of one parameter's elements that this rank saves and restores.

    ``start`` is the range's first index in the flattened parameter. ``tensors`` are 1-dim views of
    the float32 master weight ("weight") and of Adam's moments ("exp_avg", "exp_avg_sq"). A matrix
    that Muon trains has its momentum as "exp_avg", and no "exp_avg_sq". A frozen parameter has only
    "weight", in the network's dtype.
    """

    parameter: torch.nn.Parameter
    start: int
    tensors: dict[str, Tensor]


class ZeroEngine:
    """Network with AdamW or Muon, and with gradient clipping, run by DeepSpeed.

    ZeRO partitions the optimizer's state over the ranks of ``parallel_state.data_context_group``.
    """

    def __init__(self, network: Network, recipe: Recipe, parallel_state: ParallelState) -> None:
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(dist_init_required=False)
        self.network = network
        self._parallel_state = parallel_state
        self._tied = _tied_embedding(network, recipe, parallel_state)
        self._local_norms: tuple[list[torch.nn.Parameter], Tensor] = [], torch.empty(0)
        rounds = recipe.parallel.zero_stage == 3 and recipe.training.precision == "bf16"
        float32 = {p: p.data for p in network.parameters() if p.dtype == torch.float32}
        rounded = {p: value.clone() for p, value in float32.items()} if rounds else {}
        shards = parameter_shards(network)
        create = partial(create_optimizer, shards, recipe)
        # Hide DeepSpeed's output: in bf16 it prints a memory report per parameter group.
        with redirect_stdout(io.StringIO()):
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=network,
                optimizer=_restoring({} if rounds else float32, create),
                config=engine_config(recipe),
                mpu=ModelParallelUnit(),
                dist_init_required=False,
            )
        if parallel_state.pipeline_size > 1 and hasattr(self._optimizer, "scaled_global_norm"):
            sum_norms_at_once(self._optimizer)
        keep_own_gradients(self._optimizer)
        self._reduction: GradientReduction | None = None
        shared = shared_parameters(network) if parallel_state.tensor_size > 1 else set()
        self._shared_gradients: list[Tensor] = []
        if (gradients := flat_gradients(self._optimizer)) is not None:
            self._engine.enable_backward_allreduce = False
            self._reduction = GradientReduction(
                gradients, network, parallel_state.data_context_group, REDUCE_BUCKET
            )
            self._shared_gradients = [
                gradient
                for group in gradients.groups
                for parameter, gradient in group.gradients()
                if parameter in shared
            ]
        else:
            sum_in_backward(shared, parallel_state.tensor_group)
        has_peers = parallel_state.data_context_group.size() > 1
        self._overlaps = has_peers and recipe.parallel.overlaps_gradients
        self._partition = partition_of(self._optimizer)
        self._exact = ExactValues(rounded, self._partition, parallel_state.data_context_group)
        self._frozen = FrozenWeights(network, parallel_state.data_context_group)
        own = self._optimizer.optimizer
        own.decaying_rows = decaying_rows(self._partition, network)
        own.muon = flat_muon(shards, recipe, self._partition, parallel_state)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Destroy the engine to end DeepSpeed's threads; its process groups must still exist."""
        if self._reduction is not None:
            self._reduction.close()
        self._engine.destroy()

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Run the network's forward pass for training through DeepSpeed.

        ZeRO 3 counts microbatches by these calls. Without the count, it would keep only the
        gradients of the last microbatch.
        """
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Run the backward pass of a microbatch, and accumulate its gradients.

        ``loss`` (0-dim) is already scaled for the sum over all microbatches. In the last microbatch
        of a step (``is_last``), the reduction over ranks may begin during the backward pass.
        """
        reduction = self._reduction if self._overlaps and is_last else None
        with nullcontext() if reduction is None else reduction.overlapping():
            self._engine.backward(loss)

    def step(self, learning_rate: float, allow: Callable[[Tensor], bool]) -> None:
        """Reduce gradients, update the weights if ``allow`` returns True, and clear the gradients.

        Every rank calls ``allow`` once, with the gradient norm over all ranks before clipping
        (0-dim float32). A rank whose gradients are not finite passes infinity. If any rank passes
        infinity, ``allow`` must return False on all ranks. Each parameter group multiplies
        ``learning_rate`` by its ``lr_factor``.
        """
        if self._reduction is None:
            self._local_norms = local_gradient_norms(
                self._partition, self.network, self._parallel_state.device
            )
            self._sum_tied_embedding()
        else:
            self._sum_tied_embedding()
            self._local_norms = self._reduction.finish()
            sum_together(self._shared_gradients, self._parallel_state.tensor_group)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_factor"]
        answers: list[bool] = []

        def gate() -> bool:
            if not answers:
                # DeepSpeed's norm can be finite although a gradient is not, because it includes
                # replicated parameters only on the first tensor-parallel rank.
                is_finite = self._local_norms[1].isfinite().all()
                norm = torch.where(is_finite, self._optimizer._global_grad_norm, torch.inf)
                answers.append(allow(norm))
            return answers[0]

        self._optimizer.optimizer.gate = gate
        self._engine.step()
        if self._reduction is not None:
            self._reduction.gradients.reset()
        self._exact.refresh()
        if not answers:
            # A gradient was not finite, so DeepSpeed dropped all gradients.
            self._partition.clean_up()
            allow(torch.tensor(torch.inf, device=self._parallel_state.device))
        elif not answers[0]:
            self._create_moments()

    def local_gradient_norms(self) -> dict[torch.nn.Parameter, float]:
        """Return the norm of each gradient on this rank in the last :meth:`step`, before clipping.

        With ZeRO 1 and no offloaded optimizer, the norms are those before the reduction over ranks.
        """
        parameters, norms = self._local_norms
        return dict(zip(parameters, norms.tolist(), strict=True))

    def fragments(self) -> Iterator[Fragment]:
        """Yield the range of each parameter that this rank stores."""
        self._create_moments()
        for parameter in self.network.parameters():
            held = self._partition.range_of(parameter) if parameter.requires_grad else None
            if held is None:
                continue
            state = self._optimizer.optimizer.state[held.flat]
            moments = {name: state[name][held.where] for name in MOMENTS if name in state}
            yield Fragment(parameter, held.start, {"weight": held.values, **moments})
        for parameter, start, values in self._frozen.ranges():
            yield Fragment(parameter, start, {"weight": values})

    @property
    def updates(self) -> int:
        """Number of applied updates so far, which Adam's bias correction uses."""
        self._create_moments()
        return int(self._optimizer.optimizer.state[self._partition.flats[0]]["step"].item())

    def restore(self, updates: int) -> None:
        """Apply values written into the tensors of :meth:`fragments`, and set Adam's update count.

        All ranks must call this method.
        """
        for flat in self._partition.flats:
            self._optimizer.optimizer.state[flat]["step"].fill_(updates)
        self._partition.refresh()
        self._exact.refresh()
        self._frozen.refresh()

    def _create_moments(self) -> None:
        """Create the optimizer's state with zeros, if the first update has not yet created it."""
        for flat in self._partition.flats:
            self._optimizer.optimizer.create_state(flat)

    def _sum_tied_embedding(self) -> None:
        if self._tied is None:
            return
        gradient = accumulated_gradient(self._tied)
        if gradient is None:
            raise RuntimeError("the tied embedding has no gradient where DeepSpeed should keep it")
        distributed.all_reduce(gradient, group=self._parallel_state.embedding_group)


def engine_config(recipe: Recipe) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a recipe."""
    bf16 = recipe.training.precision == "bf16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        **clipping_settings(recipe.optimizer),
        "zero_optimization": {
            "stage": recipe.parallel.zero_stage,
            # DeepSpeed's overlap gives wrong results under pipeline parallelism, without an error.
            "overlap_comm": False,
            # DeepSpeed's default takes 2 GB even with a small model.
            "reduce_bucket_size": REDUCE_BUCKET,
        },
        # DeepSpeed's AdamW for the CPU needs a compiler.
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
        # The throughput timer would synchronize the device before and after every microbatch.
        "timers": {"throughput": {"enabled": False}},
        # DeepSpeed's list of tested classes has AdamW, but not its subclass GatedOptimizer.
        "zero_allow_untested_optimizer": True,
    }
    if recipe.parallel.offload_optimizer:
        pin = torch.cuda.is_available()
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if bf16:
        config["bf16"] = {"enabled": True, "immediate_grad_update": recipe.parallel.zero_stage == 1}
        if recipe.parallel.zero_stage == 1:
            # With an offloaded optimizer, DeepSpeed sums the gradients over the ranks. By default,
            # it would round them to bf16 before the sum.
            config["communication_data_type"] = "fp32"
    return config


def import_deepspeed() -> Any:
    """Import DeepSpeed, and prevent it from compiling anything."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with importing_engines():
        import deepspeed

        # ZeRO's first step would import this module outside of importing_engines().
        import deepspeed.runtime.zero.muon.muon_optimizer

    # Skip the search for operations that can be compiled. DeepSpeed would print a warning for each
    # operation whose compiler or headers are missing, and would compile its shared-memory
    # collectives (25-170 s).
    deepspeed.ops.__compatible_ops__ = {}
    # Hide warnings about the class of the optimizer and about skipped steps.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _restoring(
    values: dict[torch.nn.Parameter, Tensor], create: Callable[[], torch.optim.Optimizer]
) -> Callable[[object], torch.optim.Optimizer]:
    """Return a function that restores float32 parameters and then creates the optimizer.

    ``deepspeed.initialize`` calls this function after it has rounded every parameter of a bf16
    model, and before it flattens the parameter groups.
    """

    def restore_and_create(_: object) -> torch.optim.Optimizer:
        for parameter, value in values.items():
            parameter.data = value
        values.clear()  # DeepSpeed keeps a reference to this function.
        return create()

    return restore_and_create


def _tied_embedding(
    network: Network, recipe: Recipe, parallel_state: ParallelState
) -> torch.nn.Parameter | None:
    """Return this rank's copy of a trained embedding that two pipeline stages share, or None."""
    on_edge = parallel_state.is_first_stage or parallel_state.is_last_stage
    if not recipe.model.tied_embeddings or parallel_state.pipeline_size == 1 or not on_edge:
        return None
    stage = network.virtual_stages[0 if parallel_state.is_first_stage else -1]
    parameter = stage.shared_embedding_or_output_weight()
    if not parameter.requires_grad:
        return None
    if parallel_state.is_last_stage:
        parameter.ds_pipe_replicated = True
    return parameter
