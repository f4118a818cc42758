"""Reduction of ZeRO 1's gradients over the data-parallel ranks, bucket by bucket.

It runs once per step, in float32 and in place. While the backward pass of the last microbatch
continues with earlier layers, the reduction of complete buckets begins. Buckets and their order
depend on the network only. The sums are therefore the same to the bit whenever they begin, and
ranks whose gradients arrive in different orders always reduce the same bucket next.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from diffmegatron.errors import UserError
from diffmegatron.optim.flat_gradients import FlatGradients, FlatGroup


@dataclass
class Bucket:
    """Consecutive parameters of a group that are reduced together.

    Attributes:
        flat: their gradients, float32 [n].
        gradients: views into ``flat`` by parameter.
        missing: parameters whose gradient this backward pass has not completed.
        work: the running all-reduce, if any.
    """

    flat: Tensor
    gradients: dict[torch.nn.Parameter, Tensor]
    missing: set[torch.nn.Parameter] = field(default_factory=set)
    work: distributed.Work | None = None


class GradientReduction:
    """Averages flat gradients over ranks for DeepSpeed's step.

    Args:
        gradients: gradients of this rank, of the same parameters on every rank.
        network: network of the parameters, in the order of its forward pass.
        process_group: ranks to average over.
        bucket_size: maximum number of elements of a bucket; a larger parameter is its own bucket.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        network: torch.nn.Module,
        process_group: ProcessGroup,
        bucket_size: int,
    ) -> None:
        self._gradients, self._process_group = gradients, process_group
        self._names = {parameter: name for name, parameter in network.named_parameters()}
        place = {parameter: number for number, parameter in enumerate(self._names)}
        # The backward pass completes buckets from the network's end to its beginning.
        self._buckets = sorted(
            (bucket for group in gradients.groups for bucket in _buckets(group, bucket_size)),
            key=lambda bucket: -min(place[parameter] for parameter in bucket.gradients),
        )
        self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.gradients}
        self._norms: list[Tensor] = []  # One tensor per bucket whose reduction has begun.
        self._overlaps = False
        # Number of gradients per parameter in a backward pass. It exceeds 1 for a parameter that
        # several recomputed parts share.
        self._expected: Counter[torch.nn.Parameter] = Counter()
        self._arrived: Counter[torch.nn.Parameter] = Counter()
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._arrive) for each in self._bucket_of
        ]

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Reduce buckets during the backward pass of the last microbatch, inside this context.

        The previous pass shows how many gradients each parameter gets, so in the first pass the
        reduction begins at the end.

        Raises:
            UserError: If a parameter gets more gradients than in the previous pass, because its
                bucket was already reduced.
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

        Returns:
            The parameters, and the norms of their gradients on this rank before the reduction,
            [n] float32 on the device, without synchronization.
        """
        self._start(len(self._buckets))
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        size = self._process_group.size()
        if size > 1:
            torch._foreach_mul_([bucket.flat for bucket in self._buckets], 1 / size)
        self._gradients.hand_over()
        parameters = [each for bucket in self._buckets for each in bucket.gradients]
        norms, self._norms = torch.cat(self._norms), []
        return parameters, norms

    def reset(self) -> None:
        """Set the gradients to zero after DeepSpeed's step."""
        self._gradients.reset()

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _arrive(self, parameter: torch.nn.Parameter) -> None:
        """Count a gradient that was added to the flat tensor, and reduce complete buckets."""
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
        """Begin the reduction of all buckets before index ``stop``."""
        for bucket in self._buckets[len(self._norms) : stop]:
            norms = torch._foreach_norm(list(bucket.gradients.values()))
            self._norms.append(torch.stack(list(norms)))
            if self._process_group.size() > 1:
                bucket.work = distributed.all_reduce(
                    bucket.flat, group=self._process_group, async_op=True
                )


def _buckets(group: FlatGroup, size: int) -> Iterator[Bucket]:
    """Yield a group's parameters in buckets of at most ``size`` elements or one parameter."""
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
