"""Measurements of a run beside its training loss: held-out losses and suites."""

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
    """Measures a network that is being trained, and changes nothing of it.

    Attributes:
        name: of its metric, or the beginning of the names of its metrics, such as ``eval/recall``.
    """

    name: str

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """In parts of a forward pass or a few, which are the same on every rank.

        Returns:
            Values by the names of metrics, one at least.
        """


# From a recipe, before anything of it runs.
OpenEvaluators = Callable[[Recipe], Sequence[Evaluator]]


class _SplitLoss:
    """Mean loss over the first global batches of the documents of a split."""

    def __init__(self, recipe: Recipe, split: Split, name: str) -> None:
        self.name = name
        self._recipe, self._split = recipe, split

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """A global batch at a time."""
        training, losses = self._recipe.training, list[float]()
        loader = open_loader(self._recipe, parallel_state, self._split)
        for number in range(training.eval_batches):
            if number:
                yield
            batch = on_this_rank(
                loader.read_step(number * training.global_batch_size), parallel_state
            )
            loss = forward_only(network, batch, parallel_state)
            # Ranks that differ in the last bits, or alone find a NaN, would decide differently.
            losses.append(
                agree(loss, 0.0, stop=False, writing=False, parallel_state=parallel_state).loss
            )
        return {self.name: sum(losses) / len(losses)}


def split_losses(recipe: Recipe) -> list[Evaluator]:
    """Return the evaluators of the held-out splits. Those of a recipe without any never are due."""
    return [_SplitLoss(recipe, "validation", HELD_OUT), _SplitLoss(recipe, "test", TEST)]


def measure(
    due: Iterable[Evaluator],
    network: Network,
    parallel_state: ParallelState,
    goes_on: Callable[[], bool],
) -> dict[str, Values]:
    """Return the values of evaluators by the evaluators' names, up to one that is broken off.

    Args:
        due: the evaluators.
        network: this rank's.
        parallel_state: where it stands.
        goes_on: asked after every part; the same on all ranks.
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
                if not goes_on():
                    return found
    finally:
        network.train()
    return found
