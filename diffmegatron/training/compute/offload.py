"""Offload of activations to host memory between the forward and the backward pass."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def offloaded_activations(
    network: torch.nn.Module, *, enabled: bool
) -> AbstractContextManager[object]:
    """Return a context in which autograd keeps tensors saved for backward in host memory.

    Weights stay on the device. Torch's ``save_on_cpu`` would copy them in every microbatch.
    """
    if not enabled:
        return nullcontext()
    pin = torch.cuda.is_available()
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def pack(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if saved.untyped_storage().data_ptr() in weights:
            return saved
        host = torch.empty_like(saved, device="cpu", pin_memory=pin)
        return saved.device, host.copy_(saved, non_blocking=pin)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=pin)

    return saved_tensors_hooks(pack, unpack)
