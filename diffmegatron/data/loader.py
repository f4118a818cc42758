"""Collate samples into the microbatches of a data-parallel rank, and prefetch them in a thread."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.sampling.samples import Sample, Samples
from diffmegatron.errors import UserError

_PREFETCH = 2
_SAMPLES_WITH_LABELS = 64  # Number of samples that are searched for labels.


@dataclass(frozen=True)
class Batch:
    """One microbatch of b samples with s tokens each."""

    tokens: torch.Tensor  # int64 [b, s]: inputs
    labels: torch.Tensor  # int64 [b, s]: the token after each input
    loss_mask: torch.Tensor  # float32 [b, s]: 1 where the label contributes to the loss, else 0
    # int32 [documents + 1]: boundaries of documents in the b concatenated rows, from 0 to b * s.
    # Each row ends at a boundary. None if attention crosses documents.
    cu_seqlens: torch.Tensor | None = None
    # int64 [b]: index of each row's source in data.sources; None if the recipe has one source.
    sources: torch.Tensor | None = None


def collate(samples: list[Sample], config: DataConfig) -> Batch:
    """Stack samples of equal length into a microbatch.

    Labels whose ``Sample.loss_mask`` is False, such as prompts, have no loss. The first token of a
    document or of a piece of it has no loss either if attention is reset there, because it would be
    predicted from another document alone, or if ``data.eod_mask_loss`` is set.
    """
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    size, length = tokens.shape[0], tokens.shape[1] - 1
    loss_mask = torch.ones(size, length)
    for row, sample in enumerate(samples):
        if sample.loss_mask is not None:
            loss_mask[row] = torch.from_numpy(sample.loss_mask[1:])
        if config.reset_attention_mask or config.eod_mask_loss:
            loss_mask[row, sample.starts[1:] - 1] = 0
    sources = None
    if len(config.sources) > 1:
        paths = [source.path for source in config.sources]
        sources = torch.tensor([paths.index(sample.source) for sample in samples])
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        labels=tokens[:, 1:].contiguous(),
        loss_mask=loss_mask,
        cu_seqlens=_boundaries(samples, length) if config.reset_attention_mask else None,
        sources=sources,
    )


def missing_labels_warning(samples: Samples, first: int, end: int) -> str | None:
    """Return a warning if most of the first 64 samples from ``first`` to ``end`` have no label.

    A label is a token with loss. The result is None if at least half of the samples have a label.
    """
    numbers = range(first, min(end, first + _SAMPLES_WITH_LABELS))
    empty = sum(not collate([samples[n]], samples.config).loss_mask.any() for n in numbers)
    if 2 * empty <= len(numbers):
        return None
    return (
        f"{empty} of the {len(numbers)} sequences from sample {first} on have no label with loss, "
        "and a step without labels changes no weight; raise training.seq_length above the length "
        "of the prompts, or shorten them (`diffmegatron data inspect` shows the labels)"
    )


def _boundaries(samples: list[Sample], length: int) -> torch.Tensor:
    """Return ``Batch.cu_seqlens`` of rows with ``length`` inputs."""
    starts = [
        row * length + sample.starts[sample.starts < length] for row, sample in enumerate(samples)
    ]
    return torch.from_numpy(np.concatenate([*starts, [len(samples) * length]]).astype(np.int32))


@dataclass(eq=False)
class Loader:
    """Iterator over optimizer steps; each item is the list of this rank's microbatches.

    In the global batch that begins at sample n, microbatch m of data-parallel rank r begins at
    sample n + (m * data_parallel_size + r) * micro_batch_size. A global batch thus contains the
    same samples for every number of ranks.

    A thread reads steps ahead until the ``with`` block of the loader ends. If a step cannot be
    read, the error is raised when this step is requested.
    """

    samples: Samples
    micro_batch_size: int  # samples per microbatch of one rank
    global_batch_size: int  # samples per optimizer step, over all ranks
    data_parallel_rank: int
    data_parallel_size: int
    consumed_samples: int = 0  # index of the first sample of the next step

    def __post_init__(self) -> None:
        self._per_microbatch = self.micro_batch_size * self.data_parallel_size
        if self.global_batch_size % self._per_microbatch:
            raise UserError(
                f"global batch {self.global_batch_size} is not a multiple of micro-batch "
                f"{self.micro_batch_size} x data parallel {self.data_parallel_size}"
            )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data-prefetch")
        self._steps: deque[Future[list[Batch]]] = deque()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        while len(self._steps) <= _PREFETCH:
            first = self.consumed_samples + len(self._steps) * self.global_batch_size
            self._steps.append(self._thread.submit(self.read_step, first))
        batches = self._steps[0].result()  # A failed step stays in the queue and fails again.
        self._steps.popleft()
        self.consumed_samples += self.global_batch_size
        return batches

    def read_step(self, consumed_samples: int) -> list[Batch]:
        """Return this rank's microbatches of the step that begins at ``consumed_samples``."""
        size = self.micro_batch_size
        start = consumed_samples + self.data_parallel_rank * size
        return [
            collate([self.samples[first + n] for n in range(size)], self.samples.config)
            for first in range(start, start + self.global_batch_size, self._per_microbatch)
        ]

    def state(self) -> dict[str, Any]:
        """Return the position in the data as JSON-serializable values, equal on all ranks."""
        return self.samples.state(self.consumed_samples)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)
