"""Evaluators: measurements of a network during training, such as the held-out losses."""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Protocol

from diffmegatron.config.schema import Recipe
from diffmegatron.data.sampling.document_order import Split
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.agreement import agree
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import forward_only
from diffmegatron.training.monitoring.due import HELD_OUT, TEST

Values = dict[str, float]


class Evaluator(Protocol):
    """Measurement of the network during training, which leaves the weights unchanged.

    Attributes:
        name: name of its metric, or prefix of the names of its metrics, such as ``eval/recall``.
    """

    name: str

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Measure in parts of a few forward passes, the same on every rank, and yield between them.

        A stop request can end the measurement at a yield.

        Returns:
            Values by the name of the metric.
        """


OpenEvaluators = Callable[[Recipe], Sequence[Evaluator]]


class _SplitLoss:
    """Mean loss of the first ``training.eval_batches`` global batches of a split."""

    def __init__(self, recipe: Recipe, split: Split, name: str) -> None:
        self.name = name
        self._recipe, self._split = recipe, split

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Measure the loss; each part is one global batch."""
        training, losses = self._recipe.training, list[float]()
        loader = open_loader(self._recipe, parallel_state, self._split)
        for number in range(training.eval_batches):
            if number:
                yield
            batch = on_this_rank(
                loader.read_step(number * training.global_batch_size), parallel_state
            )
            loss = forward_only(network, batch, parallel_state)
            # The loss may be NaN on one rank only, but all ranks must make the same decisions.
            losses.append(
                agree(loss, 0.0, stop=False, writing=False, parallel_state=parallel_state).loss
            )
        return {self.name: sum(losses) / len(losses)}


def split_losses(recipe: Recipe) -> list[Evaluator]:
    """Return the evaluators of the validation and test losses, even if they are never due."""
    return [_SplitLoss(recipe, "validation", HELD_OUT), _SplitLoss(recipe, "test", TEST)]


def measure(
    due: Iterable[Evaluator],
    network: Network,
    parallel_state: ParallelState,
    should_continue: Callable[[], bool],
) -> dict[str, Values]:
    """Run evaluators one after the other until ``should_continue`` returns False.

    Args:
        should_continue: called after every part; must return the same value on all ranks.

    Returns:
        Values of each evaluator that was completed, by the evaluator's name.
    """
    found: dict[str, Values] = {}
    network.eval()
    try:
        for evaluator in due:
            parts: Generator[None, None, Values] | None = evaluator.measure(network, parallel_state)
            while parts is not None:
                try:
                    next(parts)
                except StopIteration as end:
                    found[evaluator.name] = end.value
                    parts = None
                if not should_continue():
                    return found
    finally:
        network.train()
    return found
