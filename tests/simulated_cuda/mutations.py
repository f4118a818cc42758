"""Functions that patch a deliberate mistake into the training code.

The simulation must refuse each mistake. The docstring of each function describes its mistake.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from torch import distributed

from diffmegatron.optim import reduction
from diffmegatron.training.compute import step as compute_step
from tests.simulated_cuda import step


class _Distributed:
    """``torch.distributed`` for one module, with another ``all_reduce``."""

    def __init__(self, all_reduce: Any) -> None:
        self.all_reduce = all_reduce

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed, name)


def reduce_on_the_host() -> None:
    """Sum the gradients in the host's memory."""

    def all_reduce(tensor: torch.Tensor, **keywords: Any) -> Any:
        return distributed.all_reduce(torch.zeros(tensor.numel(), device="cpu"), **keywords)

    reduction.distributed = _Distributed(all_reduce)


def gather_too_little() -> None:
    """Pass this rank's shard without its last row to the all-gather of sequence parallelism."""
    original = mappings.dist_all_gather_func

    def gather(output: torch.Tensor, own: torch.Tensor, **keywords: Any) -> Any:
        return original(output, own[:-1].contiguous(), **keywords)

    mappings.dist_all_gather_func = gather


def gather_another_dtype() -> None:
    """Pass float32 to an all-gather into bf16."""
    original = mappings.dist_all_gather_func

    def gather(output: torch.Tensor, own: torch.Tensor, **keywords: Any) -> Any:
        return original(output, own.float(), **keywords)

    mappings.dist_all_gather_func = gather


def multiply_by_float32() -> None:
    """Leave one matrix of a bf16 network in float32."""
    original = step.build_model

    def build_model(*args: Any, **keywords: Any) -> Any:
        network = original(*args, **keywords)
        layer = network.virtual_stages[0].decoder.layers[0]
        layer.mlp.linear_fc2.weight.data = layer.mlp.linear_fc2.weight.data.float()
        return network

    step.build_model = build_model


def index_by_the_host() -> None:
    """Index a tensor on the device by a tensor in the host's memory."""
    original = compute_step._masked_sum

    def masked_sum(batch: Any, losses: torch.Tensor, observe: Any) -> torch.Tensor:
        return original(batch, losses[torch.zeros(1, dtype=torch.int64)], observe)

    compute_step._masked_sum = masked_sum


def read_the_loss() -> None:
    """Read the loss of every microbatch on the host, which waits for the device."""
    original = compute_step._masked_sum

    def masked_sum(*args: Any) -> torch.Tensor:
        loss = original(*args)
        loss.item()
        return loss

    compute_step._masked_sum = masked_sum


def count_by_nonzero() -> None:
    """Create a tensor whose size depends on the values of the loss mask."""
    original = compute_step._masked_sum

    def masked_sum(batch: Any, losses: torch.Tensor, observe: Any) -> torch.Tensor:
        batch.loss_mask.nonzero()
        return original(batch, losses, observe)

    compute_step._masked_sum = masked_sum


def synchronize() -> None:
    """Wait for the device before the gradients are summed over ranks."""
    original = reduction.GradientReduction.finish

    def finish(self: Any) -> Any:
        torch.cuda.synchronize()
        return original(self)

    reduction.GradientReduction.finish = finish


def launch_on_the_host() -> None:
    """Pass a tensor of the host to a Triton kernel."""
    from diffmegatron.model import network

    original = network.cross_entropy

    def loss(labels: torch.Tensor, *more: Any) -> torch.Tensor:
        on_host = torch.zeros(labels.shape, dtype=labels.dtype, device="cpu")
        return original(on_host, *more)

    network.cross_entropy = loss
