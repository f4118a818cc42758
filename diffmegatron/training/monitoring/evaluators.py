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
    """Interface of a measurement of the network during training; the weights must stay unchanged.

    Attributes:
        name: name of the metric, or prefix of the names of several metrics, such as
            ``eval/recall``.
    """

    name: str

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Measure in small parts, so that a stop request can end the measurement between parts.

        A part is one or a few forward passes. Every rank must have the same parts.

        Yields:
            None after each part except the last. The function :func:`measure` then checks whether
            to stop.

        Returns:
            One or more values, by the name of the metric.
        """


# Type of a function that returns the evaluators of a recipe, called before the run begins.
OpenEvaluators = Callable[[Recipe], Sequence[Evaluator]]


class _SplitLoss:
    """Evaluator of the mean loss of the first ``training.eval_batches`` global batches of a split.

    The splits are disjoint sets of documents: training, validation and test.
    """

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
            # The loss may differ between ranks in the last bit, or be NaN on one rank only. Reduce
            # it to one value, because all ranks must make the same decisions.
            losses.append(
                agree(loss, 0.0, stop=False, writing=False, parallel_state=parallel_state).loss
            )
        return {self.name: sum(losses) / len(losses)}


def split_losses(recipe: Recipe) -> list[Evaluator]:
    """Return the evaluators of the validation and test losses.

    Both are returned for every recipe. They run only if
    :func:`~diffmegatron.training.monitoring.due.due_at` selects them.
    """
    return [_SplitLoss(recipe, "validation", HELD_OUT), _SplitLoss(recipe, "test", TEST)]


def measure(
    due: Iterable[Evaluator],
    network: Network,
    parallel_state: ParallelState,
    should_continue: Callable[[], bool],
) -> dict[str, Values]:
    """Run evaluators one after the other until ``should_continue`` returns False.

    Args:
        should_continue: called after every part of a measurement; returns the same value on all
            ranks.

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
