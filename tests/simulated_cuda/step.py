"""Training steps of a recipe on generated microbatches."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.model.network import Network
from diffmegatron.optim.guard import Guard
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import (
    ModelParallelUnit,
    ParallelState,
    process_groups,
)
from diffmegatron.training.compute.agreement import agree
from diffmegatron.training.compute.batches import on_this_rank
from diffmegatron.training.compute.step import forward_backward
from tests.simulated_cuda.recorder import Recorder
from tests.simulated_cuda.recording import Case

GROUPS = ("tensor", "context", "pipeline", "embedding", "data", "stage")
DOCUMENTS = 5


def run_steps(recipe: Recipe, case: Case, recorder: Recorder) -> dict[str, Any]:
    """Build the network and its engine, and run ``case.steps`` steps.

    Returns:
        ``applied``: for each step, whether its update was applied; ``parameters``: number of
        parameters on this rank.
    """
    applied = []
    with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
        recorder.group_names.update(group_names(parallel_state))
        with recorder.phase("build"):
            network = build_model(recipe, parallel_state)
        recorder.watch(network)
        with recorder.phase("engine"):
            engine = ZeroEngine(network, recipe, parallel_state)
        parameters = sum(each.numel() for each in network.parameters())
        with engine:
            label(recorder, network, engine)
            for _ in range(case.steps):
                applied.append(train_step(recipe, case, recorder, engine, parallel_state))
                label(recorder, network, engine)
    return {"applied": applied, "parameters": parameters}


def train_step(
    recipe: Recipe, case: Case, recorder: Recorder, engine: ZeroEngine, state: ParallelState
) -> bool:
    """Run one step like :func:`diffmegatron.training.trainer.train_step`.

    Returns:
        True if the update was applied.
    """
    count = case.microbatches or recipe.num_microbatches(case.world_size)
    microbatches = on_this_rank([batch(recipe)] * count, state)
    with recorder.phase("forward_backward", is_step=True):
        loss = forward_backward(
            engine, microbatches, state, offload_activations=recipe.training.offload_activations
        )
        # ZeRO 2 makes new gradient tensors in every step, which need a label before the phase ends.
        label(recorder, engine.network, engine)
    del microbatches
    guard, applied = Guard(recipe.guard), False

    def should_apply(norm: torch.Tensor) -> bool:
        nonlocal applied
        agreed = agree(loss, norm, parallel_state=state)
        applied = guard.decide(agreed.loss, agreed.gradient_norm).applied
        return applied

    with recorder.phase("update", is_step=True):
        engine.step(recipe.optimizer.lr, should_apply)
    return applied


def group_names(state: ParallelState) -> dict[str, str]:
    """Return a mapping from torch's names of process groups to their names in recordings."""
    names = {
        torch.distributed.group.WORLD.group_name: "world",
        ModelParallelUnit().get_model_parallel_group().group_name: "model",
    }
    for name in GROUPS:
        group = _group(state, name)
        if group is not None:
            names[group.group_name] = name
    return names


def _group(state: ParallelState, name: str) -> Any:
    if name == "embedding" and not (state.is_first_stage or state.is_last_stage):
        return None
    return state.data_context_group if name == "data" else getattr(state, f"{name}_group")


def label(recorder: Recorder, network: Network, engine: ZeroEngine) -> None:
    """Label the tensors that the engine holds between steps by their component."""
    optimizer = engine._optimizer
    recorder.label("gradients", _tensors(vars(optimizer).get("fp32_groups_gradients_flat", [])))
    if engine._reduction is not None:
        groups = engine._reduction.gradients.groups
        recorder.label("gradients", [group.flat for group in groups])
    averaged = torch.utils._pytree.tree_leaves(getattr(optimizer, "averaged_gradients", {}))
    # Some entries are objects that create views of the tensor in their field ``flat_partition``.
    recorder.label("gradients", _tensors([getattr(x, "flat_partition", x) for x in averaged]))
    # With an offloaded optimizer, ZeRO 1 accumulates gradients on the parameters.
    recorder.label("gradients", _tensors([vars(p).get("grad_accum") for p in network.parameters()]))
    for bucket in getattr(optimizer, "ipg_buckets", {}).values():
        recorder.label("buffers", _tensors(bucket.buffer))
    # ZeRO 3 accumulates gradients in one buffer.
    recorder.label("gradients", _tensors(vars(optimizer).get("grad_partitions_flat_buffer", None)))
    recorder.label("weights", _weights(network))
    for flat, state in optimizer.optimizer.state.items():
        recorder.label("optimizer", [flat, *_tensors(state)])
    recorder.label("optimizer", engine._partition.flats)


def _weights(network: Network) -> Iterator[Tensor]:
    for parameter in network.parameters():
        # With ZeRO 3, the parameter is empty, and its attribute ``ds_tensor`` has the partition.
        yield getattr(parameter, "ds_tensor", parameter)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def batch(recipe: Recipe) -> Batch:
    """Return a microbatch in host memory.

    Each row has ``DOCUMENTS`` documents if the recipe restricts attention to documents.
    """
    rows, length = recipe.training.micro_batch_size, recipe.training.seq_length
    tokens = torch.zeros(rows, length, dtype=torch.int64)
    boundaries = None
    if recipe.data.reset_attention_mask:
        starts = [-(-number * length // DOCUMENTS) for number in range(rows * DOCUMENTS + 1)]
        boundaries = torch.tensor(starts, dtype=torch.int32)
    return Batch(
        tokens=tokens,
        labels=tokens,
        loss_mask=torch.ones(rows, length),
        cu_seqlens=boundaries,
    )
