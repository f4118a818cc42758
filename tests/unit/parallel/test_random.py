"""Random states of a checkpoint, restored by name if they fit the device and torch's version."""

from unittest import mock

import pytest
import torch

from diffmegatron.errors import UserError
from diffmegatron.parallel import random
from diffmegatron.parallel.random import random_states, restore_random_states


def test_a_saved_state_gives_the_same_numbers_again():
    saved = random_states()
    numbers = torch.rand(3)
    restore_random_states(saved.get)
    assert torch.equal(torch.rand(3), numbers)
    restore_random_states(lambda name: None)
    assert not torch.equal(torch.rand(3), numbers)


@pytest.mark.parametrize(("saved_bytes", "own_bytes"), [(5056, 16), (16, 5056)])
def test_states_of_another_kind_of_device_stay_as_seeded(saved_bytes, own_bytes, monkeypatch):
    """Check that a saved state from the other kind of device (GPU or CPU) is not restored.

    The present state stays as it was seeded, and its name is returned. A state in Megatron's
    tracker has 5,056 bytes on a CPU and 16 bytes on a GPU.
    """
    own = torch.ones(own_bytes, dtype=torch.uint8)
    tracker = mock.Mock(get_states=lambda: {"model-parallel": own})
    monkeypatch.setattr(random, "get_cuda_rng_tracker", lambda: tracker)
    saved = random_states() | {"random.tracked.model-parallel": own.new_zeros(saved_bytes)}
    torch.rand(3)
    assert restore_random_states(saved.get) == ["random.tracked.model-parallel"]
    assert torch.equal(torch.get_rng_state(), saved["random.cpu"])
    tracker.set_states.assert_called_once_with({"model-parallel": own})


def test_a_state_of_another_size_is_an_error_and_changes_nothing():
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=r"random\.cpu has 3 bytes and this torch version's \d+"):
        restore_random_states(lambda name: torch.zeros(3, dtype=torch.uint8))
    assert torch.equal(torch.get_rng_state(), before)
