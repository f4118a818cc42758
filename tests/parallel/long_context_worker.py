"""Context-parallel ranks that share one long sequence and compute its loss and gradient.

:mod:`tests.parallel.test_long_context` starts the ranks through :mod:`tests.ranks`. The arguments
are ``COMMUNICATION LENGTH ...``. For each LENGTH, rank 0 prints a line of JSON with

- ``loss``: loss of the sequence.
- ``gradient_norm``: norm of the gradient of all weights.
- ``peak_mib``: peak memory of rank 0's tensors in the forward and backward passes, without the
  weights, in MiB.
"""

import json
import sys

import torch
from torch import distributed

from diffmegatron.config.schema import Recipe
from diffmegatron.data.loader import Batch
from diffmegatron.model.build import build_model
from diffmegatron.parallel.default_group import default_group
from diffmegatron.parallel.parallel_state import ParallelState, process_groups
from diffmegatron.training.compute.batches import on_this_rank
from diffmegatron.training.compute.step import summed_loss
from tests.parallel.allocated import AllocatedTensors, living_storages


def long_recipe(length: int, context: int, communication: str) -> Recipe:
    """Return a recipe of one layer with one differential head.

    Each of the head's two attention maps has queries and keys of width 8.
    """
    return Recipe.model_validate(
        {
            "run_dir": "unused",
            "model": {
                "num_layers": 1,
                "hidden_size": 16,
                "attention": {"kind": "diff_v1", "num_heads": 1},
                "ffn_hidden_size": 32,
                "vocab_size": 320,
            },
            "data": {"tokenizer": "bytes", "sources": [{"path": "unused"}]},
            "training": {
                "seq_length": length,
                "global_batch_size": 1,
                "steps": 1,
                "precision": "fp32",
                "loss_chunk": 2048,
            },
            "optimizer": {"lr": 1e-3},
            "parallel": {"context": context, "context_communication": communication},
        }
    )


def measure(recipe: Recipe) -> dict[str, float]:
    """Return the loss and gradient norm over all ranks, and the peak memory of this rank."""
    known = living_storages()
    with process_groups(recipe.parallel, seed=1) as parallel_state:
        network = build_model(recipe, parallel_state)
        (batch,) = on_this_rank([_sequence(recipe.training.seq_length)], parallel_state)
        with AllocatedTensors(known) as allocated:
            held = allocated.now
            loss = summed_loss(network, batch)
            loss.backward()
            peak = allocated.peak - held
        return {
            "loss": _sum(loss.detach(), parallel_state),
            "gradient_norm": _gradient_norm(network, parallel_state),
            "peak_mib": peak / 2**20,
        }


def _sequence(length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(320, (1, length + 1), generator=generator)
    return Batch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        loss_mask=torch.full((1, length), 1 / length),
    )


def _sum(value: torch.Tensor, parallel_state: ParallelState) -> float:
    distributed.all_reduce(value, group=parallel_state.data_context_group)
    return value.item()


def _gradient_norm(network: torch.nn.Module, parallel_state: ParallelState) -> float:
    squares = torch.zeros(())
    for parameter in network.parameters():
        assert parameter.grad is not None
        distributed.all_reduce(parameter.grad, group=parallel_state.data_context_group)
        squares += parameter.grad.square().sum()
    return squares.sqrt().item()


def main() -> None:
    """Measure every length named on the command line."""
    communication, *lengths = sys.argv[1:]
    with default_group():
        ranks = distributed.get_world_size()
        for length in lengths:
            recipe = long_recipe(int(length), ranks, communication if ranks > 1 else "auto")
            result = measure(recipe)
            if distributed.get_rank() == 0:
                print(json.dumps(result), flush=True)
