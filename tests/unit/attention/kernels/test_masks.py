"""The tables of visible intervals that the Triton kernels read."""

import torch

from diffmegatron.attention.kernels.masks import AttentionMask


def test_the_layers_of_a_batch_share_one_table():
    """Check that equal masks share one table.

    If each layer had its own table, each table would be copied to the GPU, and the host would wait
    for the GPU at each copy.
    """
    first, second = (AttentionMask(6, 6, cu_seqlens=(0, 2, 6)) for _ in range(2))
    device = torch.device("cpu")
    assert first.key_intervals(device) is second.key_intervals(device)
    assert first.query_intervals(device) is second.query_intervals(device)
