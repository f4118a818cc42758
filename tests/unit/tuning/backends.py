"""Deliberately wrong, slow and right backends of differential attention, for a test to register."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diffmegatron.attention.kernels.call import AttentionCall
from diffmegatron.attention.kernels.costs import per_head
from diffmegatron.attention.kernels.maps import QKV
from diffmegatron.attention.kernels.pytorch import blocked
from diffmegatron.attention.kernels.registry import Backend

Attend = Callable[[AttentionCall], Tensor]


class StandIn(Backend):
    """A backend with a given function."""

    def function(self, name: str = "") -> Attend:
        return FUNCTIONS[self.entry]


_calls = {"second": 0}


def stand_in(name: str) -> StandIn:
    """Return a backend whose function is ``FUNCTIONS[name]``, without chunks; count from 0."""
    _calls["second"] = 0
    return StandIn(
        "pytorch.blocked", name, per_head((0, 0), (0, 0)), entry=name, lacks=frozenset({"chunks"})
    )


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return 1.0001 * grad


def wrong_in_one_gradient(call: AttentionCall) -> Tensor:
    (q1, q2), (k1, k2), v = call.maps
    maps = QKV((q1, q2), (k1, _ScaledGradient.apply(k2)), v)
    return blocked.attend(AttentionCall(maps, call.scale, call.mask, call.lambda_, call.norm))


def _distorted(out: Tensor) -> Tensor:
    """Return values with an error that a headwise norm does not remove."""
    return out + 1e-3 * out.flip(-1)


def wrong_in_one_row(call: AttentionCall) -> Tensor:
    out = blocked.attend(call)
    row = out.shape[1] - 5
    return torch.cat([out[:, :row], _distorted(out[:, row : row + 1]), out[:, row + 1 :]], 1)


def wrong_at_a_length(call: AttentionCall) -> Tensor:
    out = blocked.attend(call)
    return _distorted(out) if call.mask.query_length == 64 else out


def wrong_off_the_block_size(call: AttentionCall) -> Tensor:
    out = blocked.attend(call)
    return _distorted(out) if call.mask.query_length % 16 else out


def wrong_with_large_logits(call: AttentionCall) -> Tensor:
    out = blocked.attend(call)
    return _distorted(out) if call.maps.queries[0].abs().max() > 10 else out


def wrong_in_its_second_call(call: AttentionCall) -> Tensor:
    _calls["second"] += 1
    out = blocked.attend(call)
    return _distorted(out) if _calls["second"] == 2 else out


def not_a_number(call: AttentionCall) -> Tensor:
    return blocked.attend(call) * torch.nan


def fails(call: AttentionCall) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


def slow(call: AttentionCall) -> Tensor:
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    return blocked.attend(call)


FUNCTIONS: dict[str, Attend] = {
    function.__name__: function
    for function in (
        wrong_in_one_gradient,
        wrong_in_one_row,
        wrong_at_a_length,
        wrong_off_the_block_size,
        wrong_with_large_logits,
        wrong_in_its_second_call,
        not_a_number,
        fails,
        slow,
    )
}
