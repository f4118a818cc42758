"""The training loss of each source of a mixture, and the tokens that it is the mean of."""

from pathlib import PurePath

import torch
from torch import Tensor, distributed

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.loader import Batch
from diffmegatron.files import shortest_ends
from diffmegatron.parallel.parallel_state import ParallelState

SOURCE_LOSS, SOURCE_TOKENS = "train/loss/", "train/loss_tokens/"


class SourceLosses:
    """Adds up losses and tokens by source, from one report to the next.

    Each rank adds up what it sees, on its device and without waiting for it; the ranks meet in the
    report. Where there is one source, whose loss is the run's, nothing is added and reported.

    Args:
        data: the ``data`` section.
        parallel_state: where this rank stands.
    """

    def __init__(self, data: DataConfig, parallel_state: ParallelState) -> None:
        self._names = shortest_ends([PurePath(source.path) for source in data.sources])
        self._parallel_state = parallel_state
        self._numbers = torch.arange(len(self._names), device=parallel_state.device)
        self.clear()

    def clear(self) -> None:
        """Forget the steps since the last report."""
        # Losses and tokens of each source, and what the microbatches of this step add.
        self._sums = torch.zeros(
            2, len(self._names), dtype=torch.float64, device=self._numbers.device
        )
        self._step: list[Tensor] = []

    def add(self, batch: Batch, losses: Tensor) -> None:
        """A microbatch of the step under way.

        Args:
            batch: this rank's part of it.
            losses: of its tokens, ``[b, s]``, without a gradient.
        """
        if batch.sources is None:
            return
        counted = torch.stack([losses.float() * batch.loss_mask, batch.loss_mask])
        is_of = batch.sources[:, None] == self._numbers
        self._step.append(counted.sum(dim=2, dtype=torch.float64) @ is_of.double())

    def step_done(self, *, finite: bool) -> None:
        """The step is over; where it was not finite, its losses do not count."""
        for sums in self._step if finite else ():
            self._sums += sums
        self._step = []

    def report(self) -> dict[str, float]:
        """Of the steps since the last report, with all ranks; the same on every rank.

        Returns:
            ``train/loss_tokens/SOURCE``, the tokens that counted in the loss, and, where there were
            any, ``train/loss/SOURCE``, their mean loss. A source is called by the end of its path
            that no other has.
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
