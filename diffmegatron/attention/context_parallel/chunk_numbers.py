"""The chunks of a sequence in zigzag order, and those that other chunks see; without torch.

For P context-parallel ranks the sequence is cut into 2 * P chunks, counted from 0.
"""


def rank_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of a rank's two chunks, in the order of the rank's shard."""
    return rank, 2 * size - 1 - rank


def chunks_before(window: int | None, length: int, size: int) -> int:
    """Return how many earlier chunks of ``length`` tokens a chunk sees at most.

    Without a window these are all 2 * ``size`` - 1. With a window, the first token of a chunk sees
    the ``window`` - 1 tokens before it.
    """
    most = 2 * size - 1
    return most if window is None else min(most, -(-(window - 1) // length))


def seen_chunks(source: int, target: int, size: int, before: int) -> tuple[int, ...]:
    """Return which chunks (0 or 1) of the rank ``source`` a chunk of the rank ``target`` sees.

    A chunk sees itself and the ``before`` chunks before it.
    """
    return tuple(
        index
        for index, key in enumerate(rank_chunks(source, size))
        if any(0 <= query - key <= before for query in rank_chunks(target, size))
    )
