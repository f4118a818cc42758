"""Tests of the assignment of pieces to bins."""

import numpy as np

from diffmegatron.data.sampling.packing import best_fit


def test_a_piece_goes_into_the_fullest_bin_with_enough_space():
    # After 6 and 5, the bins have the free spaces 4 and 5. Only the first is full after the 4.
    assert best_fit(np.array([6, 5, 4, 3]), 10).tolist() == [0, 1, 0, 1]
