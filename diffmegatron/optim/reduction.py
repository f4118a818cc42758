"""The sum of ZeRO 1's gradients over the data-parallel ranks, bucket by bucket.

Once a step, in float32, in place. A bucket whose gradients are complete is summed while the
backward pass of the last microbatch goes on to earlier layers. Which buckets there are and in which
order they are summed depends on the network alone: so the sums are the same bits whenever they
begin, and ranks whose gradients come in different orders sum the same bucket next.
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
    """Consecutive parameters of a group, of which the first is the last to have its gradient.

    Attributes:
        flat: their gradients, float32 [n].
        gradients: by parameter, views into ``flat``.
        missing: the parameters whose gradient this backward pass has not completed.
        work: the sum under way.
    """

    flat: Tensor
    gradients: dict[torch.nn.Parameter, Tensor]
    missing: set[torch.nn.Parameter] = field(default_factory=set)
    work: distributed.Work | None = None


class GradientReduction:
    """Averages flat gradients over ranks, for DeepSpeed's step.

    Args:
        gradients: of this rank, of the same parameters on every one.
        network: whose parameters they are, in the order of the forward pass.
        process_group: the ranks to sum over.
        bucket_size: elements of a bucket; a larger parameter is one by itself.
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
        # As the backward pass completes them, which goes from the network's end to its beginning.
        self._buckets = sorted(
            (bucket for group in gradients.groups for bucket in _buckets(group, bucket_size)),
            key=lambda bucket: -min(place[parameter] for parameter in bucket.gradients),
        )
        self._bucket_of = {each: bucket for bucket in self._buckets for each in bucket.gradients}
        self._norms: list[Tensor] = []  # of the buckets whose sum has begun
        self._overlaps = False
        # How often a parameter's gradient comes in a backward pass: recomputed in several parts
        # that share a parameter, it brings one of each.
        self._expected: Counter[torch.nn.Parameter] = Counter()
        self._arrived: Counter[torch.nn.Parameter] = Counter()
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._arrive) for each in self._bucket_of
        ]

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Around the backward pass of the last microbatch: sums begin in it, the last at its end.

        How often each gradient comes is learned from the pass before: the first one sums at its
        end.

        Raises:
            UserError: a gradient comes more often than it did in the pass before, too late.
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
        """Wait for the averages and hand them over, beginning the sums that have not begun.

        Returns:
            The parameters, and the norms of their gradients on this rank before the sum,
            [n] float32, on the device and without waiting for it.
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
        """Make the gradients of the next step zero, after DeepSpeed's step."""
        self._gradients.reset()

    def close(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()

    def _arrive(self, parameter: torch.nn.Parameter) -> None:
        """A gradient has been added to the flat tensor."""
        if not self._overlaps:
            return
        bucket = self._bucket_of[parameter]
        if bucket.work is not None:
            raise UserError(
                f"a gradient of {self._names[parameter]} came after its sum over the ranks had "
                "begun, more often than in the step before; give parallel.overlap_gradients false"
            )
        self._arrived[parameter] += 1
        if self._arrived[parameter] == self._expected[parameter]:
            bucket.missing.discard(parameter)
        ready = len(self._norms)
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            ready += 1
        self._start(ready)

    def _start(self, stop: int) -> None:
        """Begin the sums of all buckets before number ``stop``."""
        for bucket in self._buckets[len(self._norms) : stop]:
            norms = torch._foreach_norm(list(bucket.gradients.values()))
            self._norms.append(torch.stack(list(norms)))
            if self._process_group.size() > 1:
                bucket.work = distributed.all_reduce(
                    bucket.flat, group=self._process_group, async_op=True
                )


def _buckets(group: FlatGroup, size: int) -> Iterator[Bucket]:
    """A group's parameters in buckets of at most ``size`` elements, or of one parameter."""
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
