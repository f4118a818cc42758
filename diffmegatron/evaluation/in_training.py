"""Evaluation suites during training (``training.evaluate``), on the network that is trained.

All ranks process the same items in the same order, because every rank takes part in each forward
pass.
"""

import re
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from typing_extensions import override

from diffmegatron.config.schema import Recipe
from diffmegatron.config.training_config import EvaluateConfig
from diffmegatron.data.loader import Batch
from diffmegatron.data.tokenizers import Tokenizer, load_tokenizer
from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.answers import WrittenText, check_finite
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Answer, Generation, Request, Scored, Scoring
from diffmegatron.evaluation.suite import Item, Suite
from diffmegatron.evaluation.suites import MAX_DEFAULT_CONTEXT, SUITES
from diffmegatron.evaluation.targets import Target
from diffmegatron.files import shorten
from diffmegatron.hf.configuration import hugging_face_class
from diffmegatron.hf.pretrained_files import find_original
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.batches import on_this_rank
from diffmegatron.training.compute.step import next_tokens, token_losses
from diffmegatron.training.monitoring.due import suite_evaluator_name
from diffmegatron.training.monitoring.evaluators import Values, without_values
from diffmegatron.training.monitoring.progress import print_line
from diffmegatron.validation import validated


def open_evaluators(recipe: Recipe) -> list["SuiteEvaluator"]:
    """Read the data of the suites in ``training.evaluate``, and return their evaluators."""
    names = [entry.suite for entry in recipe.training.evaluate]
    if len(set(names)) < len(names):
        raise UserError(f"training.evaluate names a suite twice in {', '.join(names)}")
    target = _target(recipe)
    return [_opened(entry, target) for entry in recipe.training.evaluate]


def _opened(entry: EvaluateConfig, target: "_RunTarget") -> "SuiteEvaluator":
    light = [name for name, kind in SUITES.items() if kind.within_training]
    if entry.suite not in light:
        raise UserError(
            f"training.evaluate has suite {shorten(repr(entry.suite))}; suites that can run within "
            f"training are {', '.join(light)}"
        )
    kind, settings = SUITES[entry.suite], entry.settings
    if "context" in kind.model_fields:
        settings = {"context": int(min(MAX_DEFAULT_CONTEXT, target.context))} | settings
    suite = validated(kind, settings, f"training.evaluate, suite {entry.suite!r}")
    suite.check(target)
    items = suite.items(target)
    longest = max((item.tokens for item in items), default=0)
    if not items or longest > target.context:
        problem = f"{longest:,} tokens, and training.seq_length is {target.context:,.0f}"
        raise UserError(
            f"training.evaluate has suite {entry.suite!r}, whose "
            f"{f'longest item needs {problem}' if items else 'data are empty'}"
        )
    return SuiteEvaluator(suite, items, target)


class _ExportTokenizer(Tokenizer):
    """A tokenizer whose ``decode`` skips ids without text, as the exported model's tokenizer does.

    The network can generate such ids, because its vocabulary may be larger than the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.name, self.vocab_size = tokenizer.name, tokenizer.vocab_size
        self.end_of_document, self.sha256 = tokenizer.end_of_document, tokenizer.sha256

    @override
    def encode(self, text: str) -> np.ndarray:
        return self._tokenizer.encode(text)

    @override
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._tokenizer.decode([token for token in ids if self._has_text(int(token))])

    def _has_text(self, token: int) -> bool:
        try:
            self._tokenizer.decode([token])
        except KeyError:
            return False
        return True


@dataclass(frozen=True)
class _RunTarget(Target):
    """A run in training as a target (model to evaluate).

    It encodes text in the same way as the model that is exported from the run.

    Attributes:
        bos_token_id: id of the token that the exported model expects before a text; None stands
            for the end-of-document token.
        length: length of the run's sequences in tokens.
    """

    tokenizer_name: str
    bos_token_id: int | None
    length: int

    @cached_property
    def tokenizer(self) -> Tokenizer:  # type: ignore[override]
        return _ExportTokenizer(load_tokenizer(self.tokenizer_name))

    @cached_property
    def start_token(self) -> int:
        return self.tokenizer.end_of_document if self.bos_token_id is None else self.bos_token_id

    @cached_property
    def context(self) -> float:
        return self.length


def _target(recipe: Recipe) -> _RunTarget:
    original, bos_token_id = find_original(recipe), None
    if original is not None and original.can_compute(hugging_face_class(recipe.model)):
        bos_token_id = original.config.bos_token_id
    path = Path(recipe.run_dir)
    length = recipe.training.seq_length
    return _RunTarget(path.name, path, path, path, recipe.data.tokenizer, bos_token_id, length)


class SuiteEvaluator:
    """A suite that runs during training; ``name`` is the prefix of its metrics' names."""

    def __init__(self, suite: Suite, items: Sequence[Item], target: _RunTarget) -> None:
        self.name = suite_evaluator_name(suite.name)
        self._suite, self._items, self._target = suite, items, target

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Score all items, and return the mean of each measure of the suite by the metric's name.

        The generator yields None between items, so that the caller can stop it there. If the
        network computes NaN or infinity, or no item contributes to any measure, the only result is
        the metric ``without_values`` with value 1.
        """
        model = _RunModel(self._target, network, parallel_state)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for number, item in enumerate(self._items):
            if number:
                yield
            try:
                record = self._suite.score(model, item)
            except NotFiniteError as error:
                if parallel_state.is_main:
                    print_line(
                        f"suite {self._suite.name} has no values: in item {item.key}, {error}"
                    )
                sums.clear()
                break
            for name, share in self._suite.means(record).items():
                sums[name][0] += share.total
                sums[name][1] += share.weight
        found = {
            metric_name(self._suite.name, name): total / weight
            for name, (total, weight) in sums.items()
            if weight
        }
        return found or {without_values(self.name): 1.0}


def metric_name(suite: str, measure: str) -> str:
    """Return the name of a measure's metric, e.g. ``eval/loss/bits_per_byte``.

    Commas are removed. Consecutive characters other than letters, digits and ``_.=%`` become one
    underscore.
    """
    return f"{suite_evaluator_name(suite)}/" + re.sub(r"[^\w.=%]+", "_", measure.replace(",", ""))


class _RunModel(Model):
    """A :class:`Model` that computes with a run's training network, not with an export."""

    def __init__(self, target: _RunTarget, network: Network, parallel_state: ParallelState) -> None:
        super().__init__(target)
        self._sharded, self._parallel_state = network, parallel_state

    @override
    def answers(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """Answer the requests one at a time; every new token needs a pass over the whole text."""
        for number, request in enumerate(requests):
            if isinstance(request, Scoring):
                yield number, self._score(request)
            else:
                yield number, self._generate(request)

    def _score(self, request: Scoring) -> list[Scored] | NotFiniteError:
        found = []
        for continuation in request.continuations:
            ids = [*request.context, *continuation]
            losses = token_losses(
                self._sharded, self._batch(ids[:-1], ids[1:]), self._parallel_state
            )
            nats = losses[0, len(request.context) - 1 : len(ids) - 1].cpu()
            found.append(Scored(nats, torch.empty(0, dtype=torch.bool)))
        return check_finite(found, len(request.context))

    def _generate(self, request: Generation) -> list[int] | NotFiniteError:
        text = WrittenText(request)
        while not text.has_ended:
            before = [*request.ids, *text.found]
            after = next_tokens(self._sharded, self._batch(before, before), self._parallel_state)
            token = int(after[0, len(before) - 1])
            # A negative id means that a logit is not finite.
            text.add(None if token < 0 else token, self.target.tokenizer)
        return text.answer

    def _batch(self, ids: Sequence[int], labels: Sequence[int]) -> Batch:
        """Return this rank's shard of a text, padded at the text's end, as a batch of one row.

        Every context-parallel rank has two chunks of equal length, which sequence parallelism
        divides among the tensor-parallel ranks. The text is therefore padded to a multiple of
        2 * context size * tensor size.
        """
        unit = 2 * self._parallel_state.context_size * self._parallel_state.tensor_size
        more = -len(ids) % unit
        tokens, wanted = (torch.tensor([[*each, *[0] * more]]) for each in (ids, labels))
        batch = Batch(tokens, wanted, torch.ones(tokens.shape))
        return on_this_rank([batch], self._parallel_state)[0]
