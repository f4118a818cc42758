"""Places where a training step may wait for the device, with the values that they read.

The host stops until all earlier kernels have run if a step

- reads a value of the device (``.item()``, ``.tolist()``, ``bool(tensor)``, a copy to ordinary host
  memory),
- makes a tensor whose size depends on values (``nonzero``), or
- calls a ``synchronize``.

Afterwards the device is idle until the host launches new kernels. A place is the innermost function
outside torch, as ``module.function``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wait:
    """A place that may wait in a step.

    Attributes:
        reason: reason for waiting.
        value: function that returns the values of a simulated tensor from its shape; None: numbers
            are 1 and booleans are False.
    """

    reason: str
    value: Callable[[Sequence[int]], Any] | None = None


# Places at which a step may wait, as ``module.function``. Outside of steps any code may wait.
PERMITTED = {
    "diffmegatron.training.compute.agreement.agree": Wait(
        "A step waits once for its losses, tokens, gradient norm and flags, for guard and log.",
        lambda _: [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
    ),
    "deepspeed.runtime.utils.is_invalid_grad_norm": Wait(
        "DeepSpeed refuses a norm that is not finite before the update.",
    ),
    "deepspeed.runtime.utils.clip_tensors_by_global_norm": Wait(
        "DeepSpeed clips only if the coefficient is below 1. The wait for the norm has just ended.",
        lambda _: True,
    ),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.has_overflow": Wait(
        "ZeRO 2, and ZeRO 1 with offloading, drop a step with gradients that are not finite.",
        lambda _: 0,
    ),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.update_offload_overflow_tracker":
    Wait("With offloading, ZeRO 1 and 2 check each gradient when they copy it to the host."),
    (
        "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
        ".complete_grad_norm_calculation_for_cpu_offload"
    ): Wait("With offloading, ZeRO 1 and 2 compute the norm on the host."),
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._wait_for_offload_copies": Wait(
        "With offloading, ZeRO 1 and 2 update on the host after all gradients have arrived.",
    ),
    (
        "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
        ".independent_gradient_partition_epilogue"
    ): Wait("ZeRO 3 waits in every microbatch until its gradients are reduced."),
    "deepspeed.runtime.zero.partition_parameters.Init._allgather_params_coalesced": Wait(
        "ZeRO 3 gathers its small parameters after the update and waits for them.",
    ),
}  # fmt: skip


def answer(place: str, shape: Sequence[int], dtype: Any) -> Any:
    """Return the value of a read at ``place``: a number, or nested lists of ``shape``."""
    known = PERMITTED.get(place)
    if known is not None and known.value is not None:
        return known.value(shape)
    number: Any = 1.0 if dtype.is_floating_point else (False if str(dtype) == "torch.bool" else 1)
    return _nested(number, shape)


def _nested(number: Any, shape: Sequence[int]) -> Any:
    if not shape:
        return number
    return [_nested(number, shape[1:]) for _ in range(shape[0])]
