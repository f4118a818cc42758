"""This rank's random states, for checkpoints: torch's, CUDA's and Megatron's tracker's."""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

_TRACKED = "random.tracked."


def random_states() -> dict[str, Tensor]:
    """Every random state by name, each a uint8 vector."""
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[_TRACKED + name] = state
    return states


def restore_random_states(saved: Callable[[str], Tensor | None]) -> None:
    """Set every state that ``saved`` knows by name; the others stay as seeded."""
    cpu = saved("random.cpu")
    if cpu is not None:
        torch.set_rng_state(cpu)
    cuda = saved("random.cuda")
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    tracker = get_cuda_rng_tracker()
    current = tracker.get_states()
    found = {name: saved(_TRACKED + name) for name in current}
    tracker.set_states(
        {name: current[name] if state is None else state for name, state in found.items()}
    )
