"""The training loss of each source of a mixture, and its number of counted tokens."""

from pathlib import PurePath

import torch
from torch import Tensor, distributed

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.loader import Batch
from diffmegatron.files import shortest_ends
from diffmegatron.parallel.parallel_state import ParallelState

SOURCE_LOSS, SOURCE_TOKENS = "train/loss/", "train/loss_tokens/"


class SourceLosses:
    """Sums of losses and tokens by source between two reports.

    Each rank adds up its own tokens on its device without synchronization; the report reduces over
    the ranks. With one source nothing is summed, because its loss is the run's.

    Args:
        data: the ``data`` section.
        parallel_state: layout, and this rank's place in it.
    """

    def __init__(self, data: DataConfig, parallel_state: ParallelState) -> None:
        self._names = shortest_ends([PurePath(source.path) for source in data.sources])
        self._parallel_state = parallel_state
        self._numbers = torch.arange(len(self._names), device=parallel_state.device)
        self.clear()

    def clear(self) -> None:
        """Discard the steps since the last report."""
        # Losses and tokens of each source, [2, sources]. _step has the same sums of the open step.
        self._sums = torch.zeros(
            2, len(self._names), dtype=torch.float64, device=self._numbers.device
        )
        self._step: list[Tensor] = []

    def add(self, batch: Batch, losses: Tensor) -> None:
        """Add a microbatch of the open step.

        Args:
            batch: this rank's share of the microbatch.
            losses: losses of its tokens [b, s], detached.
        """
        if batch.sources is None:
            return
        counted = torch.stack([losses.float() * batch.loss_mask, batch.loss_mask])
        is_of = batch.sources[:, None] == self._numbers
        self._step.append(counted.sum(dim=2, dtype=torch.float64) @ is_of.double())

    def step_done(self, *, finite: bool) -> None:
        """Close the step; its losses count only if it was finite."""
        for sums in self._step if finite else ():
            self._sums += sums
        self._step = []

    def report(self) -> dict[str, float]:
        """Return the values since the last report; called on all ranks, the same on every rank.

        Returns:
            ``train/loss_tokens/SOURCE``, the number of counted tokens, and, if that is not 0,
            ``train/loss/SOURCE``, their mean loss. SOURCE is the shortest end of the source's path
            that identifies it.
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
