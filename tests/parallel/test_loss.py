"""The loss of a vocabulary that is sharded over two ranks."""

from tests.ranks import launch


def test_cross_entropy_and_z_loss_of_two_ranks_are_torchs():
    launch(2, "tests.parallel.loss_worker", ["2"], timeout=600)
