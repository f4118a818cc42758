"""Reduction of gradients over data-parallel ranks (ZeRO 1) and over tensor-parallel ranks.

A bucket is a range of flat gradients that one all-reduce over the data-parallel ranks sums in
place. The all-reduces can overlap with the last microbatch's backward pass
(``parallel.overlap_gradients``). With overlap, an all-reduce starts when its bucket and all earlier
buckets are complete. All ranks have the same order of buckets.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.errors import UserError
from diffmegatron.optim.flat_gradients import FlatGradients, FlatGroup


@dataclass
class Bucket:
    """Gradients (views of ``flat``, float32 [n]) that are reduced in one all-reduce.

    ``missing`` has the parameters with incomplete gradients during an overlapped backward pass.
    """

    flat: Tensor
    gradients: dict[torch.nn.Parameter, Tensor]
    missing: set[torch.nn.Parameter] = field(default_factory=set)
    work: distributed.Work | None = None


class GradientReduction:
    """Average of flat gradients over data-parallel ranks, which replaces DeepSpeed's reduction."""

    def __init__(
        self,
        gradients: FlatGradients,
        network: torch.nn.Module,
        process_group: ProcessGroup,
        bucket_size: int,
    ) -> None:
        self.gradients, self._process_group = gradients, process_group
        self._names = {parameter: name for name, parameter in network.named_parameters()}
        place = {parameter: number for number, parameter in enumerate(self._names)}
        # Sort the buckets in the order in which the backward pass completes them.
        self._buckets = sorted(
            (bucket for group in gradients.groups for bucket in _buckets(group, bucket_size)),
            key=lambda bucket: -min(place[parameter] for parameter in bucket.gradients),
        )
        self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.gradients}
        # Norms of the gradients of each bucket whose reduction has begun.
        self._norms: list[Tensor] = []
        self._overlaps = False
        # Number of additions to each gradient in the overlapped backward pass of the previous step
        # (_expected) and of the present step (_arrived). A number exceeds 1 if several
        # recomputed parts of the network use the same parameter.
        self._expected: Counter[torch.nn.Parameter] = Counter()
        self._arrived: Counter[torch.nn.Parameter] = Counter()
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._arrive) for each in self._bucket_of
        ]

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Reduce each bucket as soon as the backward pass inside this context completes it.

        Use this context for the last microbatch. A gradient is complete after as many additions as
        in the previous step. In the first step, the reduction starts when the context ends.
        """
        self._expected, self._arrived = self._arrived, Counter()
        for bucket in self._buckets:
            bucket.missing = set(bucket.gradients)
        self._overlaps = True
        try:
            yield
        finally:
            self._overlaps = False
        self._start(len(self._buckets))

    def finish(self) -> tuple[list[torch.nn.Parameter], Tensor]:
        """Reduce the remaining buckets, wait for all, and pass the averages to DeepSpeed.

        Return the n parameters, and the norms of their gradients on this rank before the reduction.
        The norms are float32 [n] on the device, and the host does not wait for them.
        """
        self._start(len(self._buckets))
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        size = self._process_group.size()
        if size > 1:
            torch._foreach_mul_([bucket.flat for bucket in self._buckets], 1 / size)
        self.gradients.assign_to_optimizer()
        parameters = [each for bucket in self._buckets for each in bucket.gradients]
        norms, self._norms = torch.cat(self._norms), []
        return parameters, norms

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _arrive(self, parameter: torch.nn.Parameter) -> None:
        """Record an addition to a gradient, and reduce the next buckets that are complete."""
        if not self._overlaps:
            return
        bucket = self._bucket_of[parameter]
        if bucket.work is not None:
            raise UserError(
                f"a gradient of {self._names[parameter]} arrived after its reduction had begun, "
                "because it has more gradients than in the step before; set "
                "parallel.overlap_gradients to false"
            )
        self._arrived[parameter] += 1
        if self._arrived[parameter] == self._expected[parameter]:
            bucket.missing.discard(parameter)
        ready = len(self._norms)
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            ready += 1
        self._start(ready)

    def _start(self, stop: int) -> None:
        ready = self._buckets[len(self._norms) : stop]
        if ready:
            self.gradients.add_pending()
        for bucket in ready:
            norms = torch._foreach_norm(list(bucket.gradients.values()))
            self._norms.append(torch.stack(list(norms)))
            if self._process_group.size() > 1:
                bucket.work = distributed.all_reduce(
                    bucket.flat, group=self._process_group, async_op=True
                )


def _buckets(group: FlatGroup, size: int) -> Iterator[Bucket]:
    gradients: dict[torch.nn.Parameter, Tensor] = {}
    start = stop = 0
    for parameter, gradient in group.gradients():
        if gradients and stop + parameter.numel() - start > size:
            yield Bucket(group.flat[start:stop], gradients)
            gradients, start = {}, stop
        gradients[parameter] = gradient
        stop += parameter.numel()
    if gradients:
        yield Bucket(group.flat[start:stop], gradients)


def shared_parameters(network: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the trained parameters whose gradients must be summed over tensor-parallel ranks.

    A rank's own gradient covers only its heads or, under sequence parallelism, its positions.
    """
    marks = ("sequence_parallel", "has_partial_gradient")
    return {
        parameter
        for parameter in network.parameters()
        if parameter.requires_grad and any(getattr(parameter, mark, False) for mark in marks)
    }


def sum_together(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Sum float32 gradients over the ranks of a group in place."""
    if not gradients:
        return
    total = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(total, group=group)
    parts = total.split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        list(gradients), [part.view_as(x) for part, x in zip(parts, gradients, strict=True)]
    )


def sum_in_backward(parameters: set[torch.nn.Parameter], group: ProcessGroup) -> None:
    """Register hooks that sum each gradient over the group as soon as autograd has computed it.

    ZeRO 2, ZeRO 3 and an offloaded optimizer use gradients already during the backward pass, so a
    sum after this pass would be too late.
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total, group=group)
        return total

    for parameter in parameters:
        parameter.register_hook(summed)
