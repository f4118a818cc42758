"""The training loss and the number of counted tokens of each source in ``data.sources``.

A token is counted if its ``loss_mask`` is 1.
"""

from pathlib import PurePath

import torch
from torch import Tensor, distributed

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.loader import Batch
from diffmegatron.files import shortest_ends
from diffmegatron.parallel.parallel_state import ParallelState

SOURCE_LOSS, SOURCE_TOKENS = "train/loss/", "train/loss_tokens/"


class SourceLosses:
    """Sums of losses and numbers of counted tokens, by source, since the last report.

    Each rank sums over its own tokens on its device, without synchronization. :meth:`report`
    reduces the sums over the ranks. With only one source nothing is summed, because the loss of
    the source is the loss of the run.
    """

    def __init__(self, data: DataConfig, parallel_state: ParallelState) -> None:
        self._names = shortest_ends([PurePath(source.path) for source in data.sources])
        self._parallel_state = parallel_state
        self._numbers = torch.arange(len(self._names), device=parallel_state.device)
        self.clear()

    def clear(self) -> None:
        """Set all sums to 0."""
        # Sum of losses and number of tokens of each source, [2, sources]. The list _step has one
        # such tensor per microbatch of the present step.
        self._sums = torch.zeros(
            2, len(self._names), dtype=torch.float64, device=self._numbers.device
        )
        self._step: list[Tensor] = []

    def add(self, batch: Batch, losses: Tensor) -> None:
        """Add a microbatch of the present step.

        Args:
            batch: microbatch on this rank's device, sharded for context parallelism.
            losses: losses of the microbatch's tokens [sequences, positions], detached.
        """
        if batch.sources is None:
            return
        counted = torch.stack([losses.float() * batch.loss_mask, batch.loss_mask])
        is_of = batch.sources[:, None] == self._numbers
        self._step.append(counted.sum(dim=2, dtype=torch.float64) @ is_of.double())

    def step_done(self, *, finite: bool) -> None:
        """End the present step: add its losses and token counts to the sums, or drop them.

        Args:
            finite: whether the step's loss and gradient norm are finite; otherwise drop the step.
        """
        for sums in self._step if finite else ():
            self._sums += sums
        self._step = []

    def report(self) -> dict[str, float]:
        """Return the metrics of all sources since the last report, and set all sums to 0.

        All ranks must call this method, and all get the same result.

        Returns:
            Two metrics per source: ``train/loss_tokens/SOURCE`` is the number of counted tokens,
            and ``train/loss/SOURCE`` is their mean loss (missing if the number is 0). SOURCE is
            the shortest suffix of the source's path that no other source has. With only one source
            the result is empty.
        """
        if len(self._names) == 1:
            return {}
        distributed.all_reduce(self._sums, group=self._parallel_state.data_group)
        if self._parallel_state.pipeline_size > 1:
            distributed.all_reduce(self._sums, group=self._parallel_state.pipeline_group)
        values: dict[str, float] = {}
        for name, loss, tokens in zip(self._names, *self._sums.tolist(), strict=True):
            values[SOURCE_TOKENS + name] = int(tokens)
            if tokens:
                values[SOURCE_LOSS + name] = loss / tokens
        self.clear()
        return values
