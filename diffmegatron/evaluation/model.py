"""A target's network in memory, and what suites ask of it."""

from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import clipped, shown
from diffmegatron.hf.modeling import register

# Positions whose logits exist at once.
_LOGITS_AT_ONCE = 1024


class Model:
    """The network of a target, as ``transformers`` computes it; loaded when it is first asked.

    Args:
        target: what it is of.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        # Tokens, and their keys and values.
        self._prefix: tuple[list[int], Cache] | None = None

    @cached_property
    def network(self) -> PreTrainedModel:
        """For evaluation: on a GPU in the dtype of its files, on a CPU in float32.

        No code of its folder is run.

        Raises:
            UserError: the folder holds no whole model.
        """
        register()
        transformers_logging.disable_progress_bar()
        is_gpu, folder = torch.cuda.is_available(), self.target.folder
        config = self.target.config
        try:
            network, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype="auto" if is_gpu else torch.float32,
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
        return network.to("cuda" if is_gpu else "cpu").eval()

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return self.network.device

    def batch(self, ids: Sequence[int]) -> Tensor:
        """Token ids as the network takes them, int64 [1, s]."""
        return torch.tensor(ids, dtype=torch.int64, device=self.device)[None]

    @torch.no_grad()
    def losses(self, ids: Sequence[int]) -> Tensor:
        """Negative log-likelihoods of ``ids[1:]`` in nats, each given all before it: float32 [s-1].

        Logits exist for 1,024 positions at once where the network's last layer is a projection of
        hidden states and nothing more, which is tried first; else for all.

        Raises:
            NotFiniteError: one is not.
        """
        batch = self.batch(ids)
        wanted = batch[0, 1:]
        if self._ends_in_projection:
            hidden = self.network.base_model(batch[:, :-1], use_cache=False).last_hidden_state[0]
            project = self.network.get_output_embeddings()
            parts = zip(hidden.split(_LOGITS_AT_ONCE), wanted.split(_LOGITS_AT_ONCE), strict=True)
            losses = torch.cat([_cross_entropy(project(part), to) for part, to in parts])
        else:
            losses = _cross_entropy(self.network(batch[:, :-1], use_cache=False).logits[0], wanted)
        bad = (~losses.isfinite()).nonzero()
        if len(bad):
            raise NotFiniteError(f"the loss of token {int(bad[0]) + 1} of {len(ids)} is not finite")
        return losses.cpu()

    @torch.no_grad()
    def last_logits(self, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> list[Tensor]:
        """What may follow each of the last ids of every text: logits [count, vocab_size], float32.

        What the texts begin with alike is computed once, and the rest of all at once.

        Args:
            texts: token ids.
            counts: how many ids of each.
        """
        shared = 0
        if len(texts) > 1:
            before = (len(ids) - count for ids, count in zip(texts, counts, strict=True))
            shared = min(_shared(texts), *before)
        cache = None
        if shared:
            first = self.network(self.batch(texts[0][:shared]), use_cache=True, logits_to_keep=1)
            cache = first.past_key_values
            cache.batch_repeat_interleave(len(texts))
        longest = max(map(len, texts))
        # Of a token that is there already: one whose numbers are not finite would spoil the others.
        rows = [[*ids[shared:], *[ids[-1]] * (longest - len(ids))] for ids in texts]
        keep = max(longest - len(ids) + count for ids, count in zip(texts, counts, strict=True))
        step = self.network(
            torch.tensor(rows, dtype=torch.int64, device=self.device),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=keep,
        )
        logits = step.logits.float().cpu()
        places = (keep - (longest - len(ids)) for ids in texts)
        return [
            row[place - count : place]
            for row, place, count in zip(logits, places, counts, strict=True)
        ]

    @torch.no_grad()
    def greedy(self, ids: Sequence[int], limit: int, stop: str | None = None) -> list[int]:
        """What the model continues ``ids`` with, the likeliest token each time.

        Ends before the end of a document, after ``limit`` tokens, or with ``stop`` in the text.

        Raises:
            NotFiniteError: a logit is not.
        """
        tokenizer = self.target.tokenizer
        # A character has four tokens at most.
        tail = 4 * len(stop or "")
        step = self.network(self.batch(ids), use_cache=True, logits_to_keep=1)
        found: list[int] = []
        while True:
            logits = step.logits[0, -1]
            if not logits.isfinite().all():
                raise NotFiniteError(f"a logit after {len(ids) + len(found)} tokens is not finite")
            token = int(logits.argmax())
            if token == tokenizer.end_of_document:
                return found
            found.append(token)
            if len(found) == limit or (stop and stop in tokenizer.decode(found[-tail:])):
                return found
            step = self.network(
                self.batch([token]), past_key_values=step.past_key_values, use_cache=True
            )

    @torch.no_grad()
    def logits_after(self, prefix: Sequence[int], ids: Sequence[int]) -> Tensor:
        """What may follow ``prefix`` and then ``ids``: logits [vocab_size], float32.

        The keys and values of the prefix are kept for the next call with the same one.

        Raises:
            NotFiniteError: one is not.
        """
        if self._prefix is None or self._prefix[0] != prefix:
            first = self.network(self.batch(prefix), use_cache=True, logits_to_keep=1)
            self._prefix = (list(prefix), first.past_key_values)
        cache = self._prefix[1]
        step = self.network(
            self.batch(ids), past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache.crop(-len(ids))
        logits: Tensor = step.logits[0, -1].float()
        if not logits.isfinite().all():
            raise NotFiniteError(f"a logit after {len(prefix) + len(ids)} tokens is not finite")
        return logits.cpu()

    @cached_property
    def _ends_in_projection(self) -> bool:
        """Whether the logits are the projected hidden states: some families scale or cap them."""
        project = self.network.get_output_embeddings()
        if project is None:
            return False
        batch = self.batch([self.target.start] * 4)
        hidden = self.network.base_model(batch, use_cache=False).last_hidden_state
        logits = self.network(batch, use_cache=False).logits
        return torch.allclose(project(hidden).float(), logits.float(), equal_nan=True)


def _shared(texts: Sequence[Sequence[int]]) -> int:
    """How many ids the texts begin with alike."""
    columns = zip(*texts, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))


def _cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), wanted, reduction="none")
