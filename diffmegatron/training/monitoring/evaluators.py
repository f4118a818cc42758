"""Evaluators: measurements of a network during training, such as the held-out losses."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Protocol

from diffmegatron.config.schema import Recipe
from diffmegatron.data.sampling.document_order import Split
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.agreement import agree
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import forward_only
from diffmegatron.training.monitoring.due import HELD_OUT, TEST
from diffmegatron.training.monitoring.progress import print_line

Values = dict[str, float]


class Evaluator(Protocol):
    """Measurement of the network during training; it must not change the weights.

    ``name`` is the name of its metric, or the prefix of its metrics' names, such as
    ``eval/recall``.
    """

    name: str

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Return values by metric name; yield after every few forward passes.

        A stop request can end the measurement at a yield. All ranks must yield equally often.
        """


OpenEvaluators = Callable[[Recipe], Sequence[Evaluator]]


class _SplitLoss:
    """Mean loss of all counted tokens in the first ``training.eval_batches`` batches of a split."""

    def __init__(self, recipe: Recipe, split: Split, name: str) -> None:
        self.name = name
        self._recipe, self._split = recipe, split

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Measure the loss; yield between two global batches.

        If no token is counted, the only result is the metric ``without_values`` with value 1.
        """
        training, total, tokens = self._recipe.training, 0.0, 0
        loader = open_loader(self._recipe, parallel_state, self._split)
        for number in range(training.eval_batches):
            if number:
                yield
            batch = on_this_rank(
                loader.read_step(number * training.global_batch_size), parallel_state
            )
            loss = forward_only(network, batch, parallel_state)
            # The loss may be NaN on only some ranks, but all ranks must make the same decisions.
            agreed = agree(loss, parallel_state=parallel_state)
            if agreed.loss is not None:
                total += agreed.loss * max(agreed.loss_tokens, 1)
                tokens += agreed.loss_tokens
        if math.isfinite(total) and not tokens:
            if parallel_state.is_main:
                print_line(f"{self.name} has no value: its sequences have no label with loss")
            return {without_values(self.name): 1.0}
        return {self.name: total / max(tokens, 1)}


def without_values(evaluator: str) -> str:
    """Return the name of the metric that an evaluator reports if it cannot compute any value."""
    return f"{evaluator}/without_values"


def split_losses(recipe: Recipe) -> list[Evaluator]:
    """Return the evaluators of the validation and test losses, even if they are never due."""
    return [_SplitLoss(recipe, "validation", HELD_OUT), _SplitLoss(recipe, "test", TEST)]


def measure(
    due: Iterable[Evaluator],
    network: Network,
    parallel_state: ParallelState,
    should_continue: Callable[[], bool],
) -> dict[str, Values]:
    """Run evaluators; return the values of each completed evaluator, by its name.

    ``should_continue`` is called at each yield and after each evaluator; False ends the function.
    """
    found: dict[str, Values] = {}

    def parts(evaluator: Evaluator) -> Iterator[None]:
        found[evaluator.name] = yield from evaluator.measure(network, parallel_state)
        yield

    network.eval()
    try:
        for evaluator in due:
            for _ in parts(evaluator):
                if not should_continue():
                    return found
    finally:
        network.train()
    return found
