"""A target's network in memory, which answers the requests of suites in batches."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.answers import generate, score
from diffmegatron.evaluation.batched_network import BatchedNetwork, Rows
from diffmegatron.evaluation.requests import Answer, Generation, Request, Scored, Scoring
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import clipped, shown
from diffmegatron.hf.modeling import register

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
Engine = Literal["transformers", "vllm"]
# Tokens of a batch where none are given. A CPU scores texts no faster in batches, but reads its
# weights once for each new token of a batch. On a GPU a batch that does not fit is halved.
_CPU_SCORING, _CPU_GENERATION, _GPU = 1, 4096, 65_536


@dataclass(frozen=True)
class Computing:
    """Where networks compute, in what precision, and how many tokens at a time.

    Attributes:
        dtype: of the weights; ``auto`` is that of the files on a GPU, and float32 on a CPU.
        device: ``auto`` is a GPU where there is one.
        batch_tokens: largest number of tokens of a batch, padding and tokens to come counted; a
            longer text is a batch of its own. None: 65,536 on a GPU; on a CPU 4,096 of texts that
            are written, and one request for likelihoods at a time.
        engine: library that computes; vLLM only writes texts
            (:mod:`~diffmegatron.evaluation.vllm_model`).

    Raises:
        UserError: there is no GPU and ``device`` is one.
    """

    dtype: DType = "auto"
    device: Device = "auto"
    batch_tokens: int | None = None
    engine: Engine = "transformers"

    def __post_init__(self) -> None:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda needs a GPU, and torch finds none; give --device cpu")

    @property
    def is_gpu(self) -> bool:
        """Whether networks are on a GPU."""
        return self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())

    def tokens(self, *, is_generation: bool) -> int:
        """Return the largest number of tokens of a batch of generation or of scoring."""
        on_cpu = _CPU_GENERATION if is_generation else _CPU_SCORING
        return self.batch_tokens or (_GPU if self.is_gpu else on_cpu)

    def dtype_of(self, target: Target) -> str:
        """Name of the dtype that a target's weights have in memory."""
        if self.dtype != "auto":
            return self.dtype
        in_files = getattr(target.config, "dtype", None) or torch.float32
        return str(in_files).removeprefix("torch.") if self.is_gpu else "float32"


class Model:
    """The network of a target, as ``transformers`` computes it, loaded at the first use.

    Args:
        target: whose network it is.
        computing: device, dtype and size of batches.
    """

    def __init__(self, target: Target, computing: Computing | None = None) -> None:
        self.target = target
        self.computing = computing or Computing()
        # Lowered once a batch does not fit into the memory.
        self._batch_tokens: float = math.inf
        # Tokens, and their keys and values.
        self._prefix: tuple[list[int], Rows] | None = None

    @cached_property
    def network(self) -> PreTrainedModel:
        """The network in evaluation mode. No code of its folder is run.

        Raises:
            UserError: the folder holds no whole model.
        """
        register()
        transformers_logging.disable_progress_bar()
        folder = self.target.folder
        config = self.target.config
        try:
            network, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, self.computing.dtype_of(self.target)),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers has no narrower one for what it does not like
            raise UserError(
                f"{shown(folder)} does not load as a model: {clipped(str(error))}"
            ) from None
        # transformers would fill a missing weight with random numbers.
        if problems := {kind: sorted(names) for kind, names in report.items() if names}:
            raise UserError(
                f"{shown(folder)} does not load as a whole model: {clipped(str(problems))}"
            )
        return network.to("cuda" if self.computing.is_gpu else "cpu").eval()

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.network.device

    def batch(self, ids: Sequence[int]) -> Tensor:
        """Token ids as the network takes them, int64 [1, s]."""
        return torch.tensor(ids, dtype=torch.int64, device=self.device)[None]

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Answer requests in batches of similar lengths, the longest first.

        A batch that does not fit into the GPU's memory is halved, and those after it are as small.

        Args:
            requests: in any order.

        Yields:
            The number of a request and its answer, batch by batch.

        Raises:
            UserError: a single request does not fit into the memory.
        """
        sizes = _sizes(requests)
        # What is shared is computed once for all of a group.
        order = sorted(range(len(requests)), key=lambda n: (sizes[n].group, -sizes[n].length))
        left = deque(order)
        while left:
            batch = [left.popleft()]
            while left and self._fits([sizes[number] for number in (*batch, left[0])]):
                batch.append(left.popleft())
            answers = self._answers_of([requests[number] for number in batch])
            tokens = _tokens([sizes[number] for number in batch])
            if answers is not None:
                yield from zip(batch, answers, strict=True)
            elif len(batch) > 1:
                self._batch_tokens = tokens // 2
                left.extendleft(reversed(batch))
            else:
                raise UserError(
                    f"a request of {tokens:,} tokens to {self.target.name} does not fit into the "
                    "GPU's memory; give --dtype bfloat16, shorter texts, or a larger GPU"
                )

    def losses(self, ids: Sequence[int]) -> Tensor:
        """Negative log-likelihoods of ``ids[1:]`` in nats, each given all before it: float32 [s-1].

        Raises:
            NotFiniteError: one is not.
        """
        ((_, answer),) = self.answers([Scoring(ids[:1], [ids[1:]])])
        if isinstance(answer, NotFiniteError):
            raise answer
        (scored,) = cast(list[Scored], answer)
        return scored.nats

    @cached_property
    def _batched(self) -> BatchedNetwork:
        return BatchedNetwork(self.network, self.target.start)

    def _fits(self, batch: Sequence["_Size"]) -> bool:
        """Whether requests may be one batch, the last of which was not in it before."""
        if batch[-1].group != batch[0].group:
            return False
        if batch[0].is_generation and not self._batched.keeps_all_tokens:
            return False
        limit = self.computing.tokens(is_generation=batch[0].is_generation)
        return _tokens(batch) <= min(limit, self._batch_tokens)

    def _answers_of(self, batch: Sequence[Request]) -> Sequence[Answer] | None:
        """Answers to the requests of a batch; None if the GPU's memory is too small."""
        try:
            if isinstance(batch[0], Scoring):
                return score(self._batched, cast(Sequence[Scoring], batch))
            return generate(
                self._batched,
                cast(Sequence[Generation], batch),
                self.target.tokenizer,
                self._read_prefix,
            )
        except torch.OutOfMemoryError:
            self._prefix = None
        torch.cuda.empty_cache()
        return None

    def _read_prefix(self, ids: Sequence[int]) -> Rows:
        """Return a row with these tokens; the last one is kept for the next batch."""
        if self._prefix is None or self._prefix[0] != ids:
            self._prefix = None
            rows = self._batched.with_cache(1, len(ids))
            self._batched.read(rows, [ids])
            self._prefix = (list(ids), rows)
        return self._prefix[1]


class _Size(NamedTuple):
    """The size of a request.

    Attributes:
        group: number of those that can be in one batch: all scoring, or generation after the same
            shared tokens.
        is_generation: whether it is generation.
        rows: that it takes of a batch.
        length: of its longest row, tokens to come counted.
    """

    group: int
    is_generation: bool
    rows: int
    length: int


def _sizes(requests: Sequence[Request]) -> list[_Size]:
    groups: dict[tuple[int, ...] | None, int] = {}
    found = []
    for request in requests:
        if isinstance(request, Scoring):
            group = groups.setdefault(None, len(groups))
            longest = len(request.context) + max(map(len, request.continuations))
            rows = len({(*each[:-1],) for each in request.continuations})
            found.append(_Size(group, False, rows, longest))
        else:
            group = groups.setdefault((*request.ids[: request.shared],), len(groups))
            found.append(_Size(group, True, 1, len(request.ids) + request.limit))
    return found


def _tokens(batch: Sequence[_Size]) -> int:
    """Tokens of a batch, padding and tokens to come counted."""
    return sum(size.rows for size in batch) * max(size.length for size in batch)
