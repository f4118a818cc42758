"""What a run is told to measure of itself beside its loss, by packages above it."""

from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from diffmegatron.config.schema import Recipe
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.agreement import agree
from diffmegatron.training.compute.batches import on_this_rank, open_loader
from diffmegatron.training.compute.step import forward_only

Values = dict[str, float]


class Evaluator(Protocol):
    """Measures a network that is being trained, and changes nothing of it.

    Attributes:
        every: how many steps.
    """

    every: int

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """In parts of a forward pass or a few, which are the same on every rank.

        Returns:
            Values by the names of metrics.
        """


HELD_OUT = "valid/loss"
# From a recipe, before anything of it runs.
OpenEvaluators = Callable[[Recipe], Sequence[Evaluator]]


class _HeldOutLoss:
    """Mean loss over the first global batches of the held-out documents."""

    def __init__(self, recipe: Recipe) -> None:
        self.every = recipe.training.eval_interval
        self._recipe = recipe

    def measure(
        self, network: Network, parallel_state: ParallelState
    ) -> Generator[None, None, Values]:
        """A global batch at a time."""
        training, losses = self._recipe.training, list[float]()
        loader = open_loader(self._recipe, parallel_state, "validation")
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
        return {HELD_OUT: sum(losses) / len(losses)}


def held_out_loss(recipe: Recipe) -> list[Evaluator]:
    """What measures it, where the recipe asks for any."""
    return [_HeldOutLoss(recipe)] if recipe.training.eval_batches else []


def measure(
    due: Sequence[Evaluator],
    network: Network,
    parallel_state: ParallelState,
    goes_on: Callable[[], bool],
) -> Values:
    """The values of evaluators, up to one that is broken off.

    Args:
        due: the evaluators.
        network: this rank's.
        parallel_state: where it stands.
        goes_on: asked after every part; the same on all ranks.
    """
    found: Values = {}
    network.eval()
    try:
        for evaluator in due:
            parts: Generator[None, None, Values] | None = evaluator.measure(network, parallel_state)
            while parts is not None:
                try:
                    next(parts)
                except StopIteration as end:
                    found |= end.value
                    parts = None
                if not goes_on():
                    return found
    finally:
        network.train()
    return found
