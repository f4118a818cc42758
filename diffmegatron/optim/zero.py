"""DeepSpeed ZeRO around this rank's pipeline stage, the engine of every layout.

Layouts use ZeRO 1, 2 or 3 without pipeline parallelism, and ZeRO 1 with it. ZeRO 0 is never used
because it is wrong in bf16 under tensor parallelism. DeepSpeed's own checkpoints load on the same
layout only, so :meth:`ZeroEngine.fragments` describes the tensors of each rank instead.
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
from diffmegatron.model.accounting import REDUCE_BUCKET
from diffmegatron.model.network import Network
from diffmegatron.optim.adamw import Gate, create_adamw, decaying_rows
from diffmegatron.optim.flat_gradients import flat_gradients
from diffmegatron.optim.float32_parameters import ExactValues
from diffmegatron.optim.frozen_weights import FrozenWeights
from diffmegatron.optim.gradient_clipping import (
    accumulated_gradient,
    clipping_settings,
    held_norms,
)
from diffmegatron.optim.partition import partition_of
from diffmegatron.optim.reduction import GradientReduction
from diffmegatron.optim.tensor_sums import (
    gradients_of,
    shared_parameters,
    sum_in_backward,
    sum_together,
)
from diffmegatron.parallel.engine_imports import importing_engines
from diffmegatron.parallel.parallel_state import ModelParallelUnit, ParallelState

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Fragment:
    """A range of one parameter's elements that this rank saves and restores.

    Attributes:
        parameter: parameter of the network.
        start: first element of the range in the flattened parameter.
        tensors: float32 master weight (``weight``) and Adam moments (``exp_avg``, ``exp_avg_sq``)
            of the range, each [n]. They are views, so writing changes the optimizer. A frozen
            parameter has only ``weight``, in the network's dtype.
    """

    parameter: torch.nn.Parameter
    start: int
    tensors: dict[str, Tensor]


class ZeroEngine:
    """AdamW with gradient clipping, its state partitioned over the data-parallel ranks."""

    def __init__(self, network: Network, recipe: Recipe, parallel_state: ParallelState) -> None:
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(dist_init_required=False)
        self.network = network
        self._parallel_state = parallel_state
        self._tied = _tied_embedding(network, recipe, parallel_state)
        self._held_norms: tuple[list[torch.nn.Parameter], Tensor] | None = None
        rounds = recipe.parallel.zero_stage == 3 and recipe.training.precision == "bf16"
        float32 = {p: p.data for p in network.parameters() if p.dtype == torch.float32}
        rounded = {p: value.clone() for p, value in float32.items()} if rounds else {}
        create = partial(create_adamw, network, recipe)
        # In bf16 DeepSpeed prints a memory report per parameter group.
        with redirect_stdout(io.StringIO()):
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=network,
                optimizer=_restoring({} if rounds else float32, create),
                config=engine_config(recipe),
                mpu=ModelParallelUnit(),
                dist_init_required=False,
            )
        self._reduction: GradientReduction | None = None
        shared = shared_parameters(network) if parallel_state.tensor_size > 1 else []
        self._shared_gradients: list[Tensor] = []
        if (gradients := flat_gradients(self._optimizer)) is not None:
            self._engine.enable_backward_allreduce = False
            self._reduction = GradientReduction(
                gradients, network, parallel_state.data_group, REDUCE_BUCKET
            )
            self._shared_gradients = gradients_of(shared, gradients)
        else:
            sum_in_backward(shared, parallel_state.tensor_group)
        has_peers = parallel_state.data_group.size() > 1
        self._overlaps = has_peers and recipe.parallel.overlaps_gradients
        self._partition = partition_of(self._optimizer)
        self._exact = ExactValues(rounded, self._partition, parallel_state.data_group)
        self._frozen = FrozenWeights(network, parallel_state.data_group)
        self._optimizer.optimizer.decaying_rows = decaying_rows(self._partition, network)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the engine before its process groups end.

        DeepSpeed's hooks keep the engine alive, and with it the threads of every group. About fifty
        threads per run would keep a processor busy.
        """
        if self._reduction is not None:
            self._reduction.close()
        self._engine.destroy()

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Run the network's forward pass for training.

        Calls must not bypass the engine: ZeRO 3 counts microbatches by the engine's forward passes,
        and would keep only the last microbatch's gradients.
        """
        return self._engine(*args, **kwargs)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulate the gradient of a microbatch's loss, which is already divided by their number.

        Args:
            loss: 0-dim.
            is_last: whether :meth:`step` follows, so that the reduction over ranks may begin.
        """
        reduction = self._reduction if self._overlaps and is_last else None
        with nullcontext() if reduction is None else reduction.overlapping():
            self._engine.backward(loss)

    def step(self, learning_rate: float, allow: Callable[[Tensor], bool]) -> None:
        """Update the weights if ``allow`` returns True, and drop the gradients otherwise.

        Args:
            learning_rate: learning rate of this update, before each group's factor.
            allow: called once on every rank before the weights or the optimizer change. Its
                argument is the gradient norm over all ranks before clipping, 0-dim float32, which
                is infinite if a gradient is not finite; such a step is never applied.
        """
        if self._reduction is None:
            self._held_norms = held_norms(
                self._partition, self.network, self._parallel_state.device
            )
            self._sum_tied_embedding()
        else:
            self._sum_tied_embedding()
            self._held_norms = self._reduction.finish()
            sum_together(self._shared_gradients, self._parallel_state.tensor_group)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_factor"]
        gate = Gate(self._optimizer, lambda norm: allow(self._checked(norm)))
        self._optimizer.optimizer.gate = gate
        self._engine.step()
        if self._reduction is not None:
            self._reduction.reset()
        self._exact.refresh()
        if gate.answer is None:
            # DeepSpeed dropped gradients that are not finite before it called the optimizer.
            allow(torch.tensor(torch.inf, device=self._parallel_state.device))
        elif not gate.answer:
            # The next step needs Adam's moments, which the refused step did not create.
            self._create_moments()

    def _checked(self, norm: Tensor) -> Tensor:
        """Return the norm, or infinity if a gradient that this rank holds is not finite.

        DeepSpeed's norm is not enough: of replicated parameters it counts only the copy of the
        first tensor-parallel rank.
        """
        assert self._held_norms is not None
        _, norms = self._held_norms
        return torch.where(norms.isfinite().all(), norm, torch.inf)

    def held_gradient_norms(self) -> dict[torch.nn.Parameter, float]:
        """Return the norm of each gradient on this rank at the beginning of the last :meth:`step`.

        With ZeRO 1 these are norms before the reduction over data-parallel and tensor-parallel
        ranks, which show the rank of a gradient that is not finite. A tied embedding is already
        summed over its two pipeline stages. With ZeRO 2 they are norms of this rank's partition
        after the reduction.
        """
        if self._held_norms is None:
            return {}
        parameters, norms = self._held_norms
        return dict(zip(parameters, norms.tolist(), strict=True))

    def fragments(self) -> Iterator[Fragment]:
        """Yield this rank's ranges of the optimizer state and the weights, by parameter."""
        self._create_moments()
        for parameter in self.network.parameters():
            held = self._partition.range_of(parameter) if parameter.requires_grad else None
            if held is None:
                continue
            state = self._optimizer.optimizer.state[held.flat]
            tensors = {"weight": held.flat.data[held.where]}
            tensors |= {name: state[name][held.where] for name in MOMENTS}
            yield Fragment(parameter, held.start, tensors)
        for parameter, start, values in self._frozen.ranges():
            yield Fragment(parameter, start, {"weight": values})

    @property
    def updates(self) -> int:
        """Number of updates so far, which Adam's bias correction uses."""
        self._create_moments()
        return int(self._optimizer.optimizer.state[self._partition.flats[0]]["step"].item())

    def restore(self, updates: int) -> None:
        """Take over values written into :meth:`fragments`, and set Adam's number of updates."""
        for flat in self._partition.flats:
            self._optimizer.optimizer.state[flat]["step"].fill_(updates)
        self._partition.refresh()
        self._exact.refresh()
        self._frozen.refresh()

    def _create_moments(self) -> None:
        """Create Adam's state, which saving and loading need before the first update."""
        for flat in self._partition.flats:
            state = self._optimizer.optimizer.state[flat]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device)
                for name in MOMENTS:
                    state[name] = torch.zeros_like(flat.data)

    def _sum_tied_embedding(self) -> None:
        """Sum the tied embedding's gradient over the first and the last stage."""
        if self._tied is None:
            return
        gradient = accumulated_gradient(self._tied)
        if gradient is None:
            raise RuntimeError("the tied embedding has no gradient where DeepSpeed should keep it")
        distributed.all_reduce(gradient, group=self._parallel_state.embedding_group)


def engine_config(recipe: Recipe) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a recipe.

    The training loop accumulates microbatches itself, so DeepSpeed must not. DeepSpeed's overlap
    of communication is off because it is wrong under pipeline parallelism without an error; ZeRO
    1's gradients are reduced by :mod:`diffmegatron.optim.reduction`.
    """
    bf16 = recipe.training.precision == "bf16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": recipe.training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        **clipping_settings(recipe.optimizer),
        "zero_optimization": {
            "stage": recipe.parallel.zero_stage,
            "overlap_comm": False,
            # DeepSpeed's default is ten times larger and takes 2 GB with a model of any size.
            "reduce_bucket_size": REDUCE_BUCKET,
        },
        # Torch's AdamW on the CPU needs no compiler, unlike DeepSpeed's.
        "zero_force_ds_cpu_optimizer": False,
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": None,
        # From the third step on this timer would synchronize around every microbatch.
        "timers": {"throughput": {"enabled": False}},
        # DeepSpeed accepts AdamW by its class, and GatedAdamW is a subclass.
        "zero_allow_untested_optimizer": True,
    }
    if recipe.parallel.offload_optimizer:
        pin = torch.cuda.is_available()
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pin}
    if bf16:
        config["bf16"] = {
            "enabled": True,
            "immediate_grad_update": recipe.parallel.zero_stage == 1,
        }
        if recipe.parallel.zero_stage == 1:
            # With offload this is one reduction per step. The microbatches accumulate in float32,
            # and rounding to bf16 before the sum over hundreds of ranks, as by default, would lose
            # that precision.
            config["communication_data_type"] = "fp32"
    return config


def import_deepspeed() -> Any:
    """Import DeepSpeed without compiling anything.

    Without CUDA, DeepSpeed would search for an accelerator and build its shared-memory collectives
    with a C++ compiler at the first call, which takes 25 to 170 s.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with importing_engines():
        import deepspeed
        import deepspeed.runtime.zero.muon.muon_optimizer  # ZeRO's first step imports it otherwise.

    # This is normally filled by a search for compilers and CUDA headers, which prints a warning per
    # operation that cannot be built. None of the operations is used.
    deepspeed.ops.__compatible_ops__ = {}
    # DeepSpeed warns about the optimizer class below and skipped steps, which the guard reports.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return deepspeed


def _restoring(
    values: dict[torch.nn.Parameter, Tensor], create: Callable[[], torch.optim.Optimizer]
) -> Callable[[object], torch.optim.Optimizer]:
    """Return a function that restores parameters and then calls ``create``, for DeepSpeed.

    In bf16 DeepSpeed rounds every parameter, and has no setting against it. It calls the given
    function after rounding and before flattening the groups.
    """

    def restore_and_create(_: object) -> torch.optim.Optimizer:
        for parameter, value in values.items():
            parameter.data = value
        # DeepSpeed keeps this function, so drop the tensors, which DeepSpeed has copied.
        values.clear()
        return create()

    return restore_and_create


def _tied_embedding(
    network: Network, recipe: Recipe, parallel_state: ParallelState
) -> torch.nn.Parameter | None:
    """Return the embedding that this stage shares with another, marked to be counted once in norms.

    Returns None if there is no such embedding or it is frozen.
    """
    on_edge = parallel_state.is_first_stage or parallel_state.is_last_stage
    if not recipe.model.tied_embeddings or parallel_state.pipeline_size == 1 or not on_edge:
        return None
    # The first rank's first virtual stage has the embedding, the last rank's last stage the output.
    stage = network.virtual_stages[0 if parallel_state.is_first_stage else -1]
    parameter = stage.shared_embedding_or_output_weight()
    if not parameter.requires_grad:
        return None
    if parallel_state.is_last_stage:
        parameter.ds_pipe_replicated = True
    return parameter
