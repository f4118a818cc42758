"""Gradients of a rank without data-parallel peers, where there is nothing to reduce.

DeepSpeed's reduction (``reduce_gradients`` in runtime/zero/stage_1_and_2.py) copies every gradient
into a bucket, divides it by one, flattens and reduces it, copies it back and into a new buffer, and
its step flattens these once more: most of the time of a small update on a CPU. Gradients that add
up in the flat partition from the start, which its step takes as it is, are the same values.
"""

from typing import Any


def is_alone(zero_optimizer: Any) -> bool:
    """Whether this is ZeRO 1 in float32 on one data-parallel rank, its state on the device.

    In bf16 ZeRO 1 is another class of DeepSpeed's, which keeps its gradients flat itself.
    """
    return (
        hasattr(zero_optimizer, "_build_compact_grad_partition_buffer")
        and not zero_optimizer.partition_gradients
        and not zero_optimizer.cpu_offload
        and not zero_optimizer.use_grad_accum_attribute
        and all(group.size() == 1 for group in zero_optimizer.real_dp_process_group)
    )


class FlatGradients:
    """The gradients of DeepSpeed's parameter groups, each group's in one tensor.

    Args:
        zero_optimizer: one that :func:`is_alone`.
    """

    def __init__(self, zero_optimizer: Any) -> None:
        self._optimizer = zero_optimizer
        # The norm, which is summed in float64, is finite where all gradients are.
        zero_optimizer.check_grad_overflow = False
        # For every parameter they count gradients and allocate buckets that stay empty.
        for hook in zero_optimizer._grad_acc_hooks:
            hook.remove()
        zero_optimizer._grad_acc_hooks.clear()
        self._groups = [
            zero_optimizer._build_compact_grad_partition_buffer(number)
            for number in range(len(zero_optimizer.params_in_partition))
        ]
        self._lend()

    def hand_over(self) -> None:
        """Put the gradients where DeepSpeed's step finds what it has reduced."""
        for number, group in enumerate(self._groups):
            self._optimizer.averaged_gradients[number] = group
        self._optimizer._release_ipg_buffers()

    def reset(self) -> None:
        """Make the gradients of the next step zero; DeepSpeed's step has forgotten them."""
        for group in self._groups:
            group.flat_partition.zero_()
        self._lend()

    def _lend(self) -> None:
        """Let the backward pass add to the flat tensors."""
        for parameters, group in zip(
            self._optimizer.params_in_partition, self._groups, strict=True
        ):
            for parameter, gradient in zip(parameters, group, strict=False):
                parameter.grad = gradient
