"""Measurements of a network during training: held-out losses, and the protocol for suites."""

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
    """A measurement of a network during training that does not change it.

    Attributes:
        name: name of its metric, or the prefix of its metrics' names, such as ``eval/recall``.
    """

    name: str

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Measure in parts of one or a few forward passes, the same parts on every rank.

        Yields:
            None after each part except the last.

        Returns:
            At least one value, by the name of its metric.
        """


# Type of a function that opens the evaluators of a recipe before the run begins.
OpenEvaluators = Callable[[Recipe], Sequence[Evaluator]]


class _SplitLoss:
    """The mean loss over the first global batches of a split's documents."""

    def __init__(self, recipe: Recipe, split: Split, name: str) -> None:
        self.name = name
        self._recipe, self._split = recipe, split

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """Measure one global batch per part."""
        training, losses = self._recipe.training, list[float]()
        loader = open_loader(self._recipe, parallel_state, self._split)
        for number in range(training.eval_batches):
            if number:
                yield
            batch = on_this_rank(
                loader.read_step(number * training.global_batch_size), parallel_state
            )
            loss = forward_only(network, batch, parallel_state)
            # The loss may differ between ranks in the last bit, or be NaN on one rank only. All
            # ranks must have the same value, because they must make the same decisions.
            losses.append(
                agree(loss, 0.0, stop=False, writing=False, parallel_state=parallel_state).loss
            )
        return {self.name: sum(losses) / len(losses)}


def split_losses(recipe: Recipe) -> list[Evaluator]:
    """Return the evaluators of the validation and test losses.

    ``due_at`` includes an evaluator only if the recipe has documents in its split.
    """
    return [_SplitLoss(recipe, "validation", HELD_OUT), _SplitLoss(recipe, "test", TEST)]


def measure(
    due: Iterable[Evaluator],
    network: Network,
    parallel_state: ParallelState,
    should_continue: Callable[[], bool],
) -> dict[str, Values]:
    """Run evaluators until one is interrupted, and return the values of the complete ones.

    Args:
        due: evaluators to run.
        network: network of this rank.
        parallel_state: layout, and this rank's place in it.
        should_continue: called after every part; returns the same on all ranks.

    Returns:
        Values of each complete evaluator by the evaluator's name.
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
