"""The training loss and number of counted tokens (``loss_mask`` 1) of each source of the data."""

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

    If there is only one source, nothing is summed.
    """

    def __init__(self, data: DataConfig, parallel_state: ParallelState) -> None:
        self._names = shortest_ends([PurePath(source.path) for source in data.sources])
        self._parallel_state = parallel_state
        self._numbers = torch.arange(len(self._names), device=parallel_state.device)
        self.clear()

    def clear(self) -> None:
        """Set all sums to 0."""
        # _sums: summed losses and numbers of counted tokens, [2, sources]. _step: one such tensor
        # per microbatch of the current step.
        self._sums = torch.zeros(
            2, len(self._names), dtype=torch.float64, device=self._numbers.device
        )
        self._step: list[Tensor] = []

    def add(self, batch: Batch, losses: Tensor) -> None:
        """Add a microbatch of the step, with its detached losses [sequences, positions]."""
        if batch.sources is None:
            return
        counted = torch.stack([losses.float() * batch.loss_mask, batch.loss_mask])
        is_of = batch.sources[:, None] == self._numbers
        self._step.append(counted.sum(dim=2, dtype=torch.float64) @ is_of.double())

    def step_done(self, *, finite: bool) -> None:
        """Add the current step to the sums; drop it if its loss or gradient norm is not finite."""
        for sums in self._step if finite else ():
            self._sums += sums
        self._step = []

    def report(self) -> dict[str, float]:
        """Return the metrics since the last report, and clear the sums; all ranks must call this.

        Returns:
            ``train/loss_tokens/SOURCE``, the number of counted tokens, and ``train/loss/SOURCE``,
            their mean loss (missing if the number is 0). SOURCE is the shortest unique suffix of
            the source's path. The result is empty if there is only one source.
        """
        if len(self._names) == 1:
            return {}
        distributed.all_reduce(self._sums, group=self._parallel_state.data_context_group)
        if self._parallel_state.pipeline_size > 1:
            distributed.all_reduce(self._sums, group=self._parallel_state.pipeline_group)
        values: dict[str, float] = {}
        for name, loss, tokens in zip(self._names, *self._sums.tolist(), strict=True):
            values[SOURCE_TOKENS + name] = int(tokens)
            if tokens:
                values[SOURCE_LOSS + name] = loss / tokens
        self.clear()
        return values
