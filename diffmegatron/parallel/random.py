"""Random states of a rank, to save in checkpoints: torch's, CUDA's and Megatron's."""

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor

from diffmegatron.errors import UserError

_TRACKED = "random.tracked."
# Size of the state of a CUDA generator in bytes: a seed and an offset of 8 bytes each.
_CUDA_BYTES = 16


def random_states() -> dict[str, Tensor]:
    """Return this rank's random states by name, 1-dim uint8 tensors."""
    states = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        states[_TRACKED + name] = state
    return states


def restore_random_states(saved: Callable[[str], Tensor | None]) -> list[str]:
    """Restore this rank's random states; ``saved`` returns a state by name, or None to skip it.

    Return the names of states that are not restored, because they were saved on the other kind of
    device (GPU or CPU).
    """
    states, of_another_device = random_states(), []
    device_sizes = {states["random.cpu"].numel(), _CUDA_BYTES}
    for name, current in states.items():
        state = saved(name)
        if state is None:
            continue
        if {state.numel(), current.numel()} == device_sizes:
            of_another_device.append(name)
            continue
        if state.shape != current.shape:
            raise UserError(
                f"the checkpoint's {name} has {state.numel()} bytes and this torch version's "
                f"{current.numel()}; resume with the versions listed in its state.json"
            )
        states[name] = state
    torch.set_rng_state(states["random.cpu"])
    if "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"])
    tracker = get_cuda_rng_tracker()
    tracker.set_states({name: states[_TRACKED + name] for name in tracker.get_states()})
    return of_another_device
