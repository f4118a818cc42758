"""Random states of a checkpoint: set by name, and only where they are of this torch."""

import pytest
import torch

from diffmegatron.errors import UserError
from diffmegatron.parallel.random import random_states, restore_random_states


def test_a_saved_state_gives_the_same_numbers_again():
    saved = random_states()
    numbers = torch.rand(3)
    restore_random_states(saved.get)
    assert torch.equal(torch.rand(3), numbers)
    restore_random_states(lambda name: None)
    assert not torch.equal(torch.rand(3), numbers)


def test_a_state_of_another_size_is_a_sentence_and_sets_nothing():
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=r"random\.cpu has 3 bytes and this torch's \d+"):
        restore_random_states(lambda name: torch.zeros(3, dtype=torch.uint8))
    assert torch.equal(torch.get_rng_state(), before)
