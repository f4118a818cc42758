"""The network of a target (a model to evaluate), which answers requests of suites in batches."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.answers import generate, score
from diffmegatron.evaluation.batched_network import BatchedNetwork
from diffmegatron.evaluation.evaluate_settings import Computing
from diffmegatron.evaluation.requests import Answer, Generation, Request, Scored, Scoring
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import format_path, shorten
from diffmegatron.hf.modeling import register
from diffmegatron.hf.pretrained_files import read_weight_index


class Model:
    """A target's network in ``transformers``, which is loaded at its first use."""

    def __init__(self, target: Target, computing: Computing | None = None) -> None:
        self.target = target
        self.computing = computing or Computing()
        # Limit on the tokens of a batch, reduced when a batch does not fit into the GPU's memory.
        self._batch_tokens: float = math.inf

    @cached_property
    def network(self) -> PreTrainedModel:
        """The network in evaluation mode. Python code in the target's folder is never run."""
        register()
        transformers_logging.disable_progress_bar()
        folder = self.target.folder
        config = self.target.config
        read_weight_index(folder)  # transformers follows an index out of the folder
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
        except Exception as error:  # transformers raises errors of any type here.
            raise UserError(
                f"transformers cannot load {format_path(folder)}: {shorten(str(error))}"
            ) from None
        # transformers fills missing weights with random numbers, so refuse an incomplete folder.
        if problems := {kind: sorted(names) for kind, names in report.items() if names}:
            raise UserError(
                f"{format_path(folder)} is not a complete model: {shorten(str(problems))}"
            )
        return network.to("cuda" if self.computing.is_gpu else "cpu").eval()

    @property
    def device(self) -> torch.device:
        """Device of the network."""
        return self.network.device

    def batch(self, ids: Sequence[int]) -> Tensor:
        """Return token ids as a batch of one text, int64 [1, len(ids)]."""
        return torch.tensor(ids, dtype=torch.int64, device=self.device)[None]

    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Yield the index and the answer of each request, in any order.

        If a batch does not fit into the GPU's memory, it is divided. Later batches of several
        requests have at most half as many tokens.
        """
        sizes = _sizes(requests)
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
                    f"a request of {tokens:,} tokens for {self.target.name} does not fit into the "
                    "GPU's memory; give --dtype bfloat16, shorter texts, or a larger GPU"
                )

    @torch.no_grad()
    def stream(
        self, ids: Sequence[int], count: int, temperature: float, seed: int
    ) -> Iterator[int]:
        """Yield ``count`` token ids that continue ``ids``, one after the other.

        With ``temperature`` 0, each is the most likely token.
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        batch, cache = self.batch(ids), None
        for _ in range(count):
            step = self.network(batch, past_key_values=cache, use_cache=True)
            logits, cache = step.logits[0, -1].float(), step.past_key_values
            if temperature:
                weights = (logits / temperature).softmax(-1)
                token = int(torch.multinomial(weights, 1, generator=generator))
            else:
                token = int(logits.argmax())
            yield token
            batch = self.batch([token])

    def losses(self, ids: Sequence[int]) -> Tensor:
        """Return losses of ``ids[1:]`` in nats, float32 [len(ids) - 1], or raise NotFiniteError."""
        ((_, answer),) = self.answers([Scoring(ids[:1], [ids[1:]])])
        if isinstance(answer, NotFiniteError):
            raise answer
        (scored,) = cast(list[Scored], answer)
        return scored.losses

    @cached_property
    def _batched(self) -> BatchedNetwork:
        return BatchedNetwork(self.network, self.target.start_token)

    def _fits(self, batch: Sequence["_Size"]) -> bool:
        """Return whether the last request of ``batch`` may be in a batch with all others."""
        if batch[-1].group != batch[0].group:
            return False
        if batch[0].is_generation and not self._batched.keeps_all_tokens:
            return False
        limit = self.computing.tokens(is_generation=batch[0].is_generation)
        return _tokens(batch) <= min(limit, self._batch_tokens)

    def _answers_of(self, batch: Sequence[Request]) -> Sequence[Answer] | None:
        """Return the answers of a batch, or None if the GPU's memory is too small."""
        try:
            if isinstance(batch[0], Scoring):
                return score(self._batched, cast(Sequence[Scoring], batch))
            requests = cast(Sequence[Generation], batch)
            return generate(self._batched, requests, self.target.tokenizer)
        except torch.OutOfMemoryError:
            self._batched.drop_prefix()
        torch.cuda.empty_cache()
        return None


class _Size(NamedTuple):
    """The size of a request.

    Attributes:
        group: number of the group; a batch has requests of one group. All scoring requests are one
            group. Generation requests with the same first ``shared`` tokens are one group.
        rows: number of rows that the request needs in a batch.
        length: number of tokens of the longest row, including the tokens to score or to generate.
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
    """Return the number of tokens of a batch, including padding and tokens to generate."""
    return sum(size.rows for size in batch) * max(size.length for size in batch)
