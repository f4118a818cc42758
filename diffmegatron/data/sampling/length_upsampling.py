"""Length up-sampling (Fu et al., arXiv 2402.10171): keep long documents, and few short ones.

Documents are selected when their order is built, so one prepared corpus serves every sequence
length. With ``data.upsampling.mode: global``, samples.py also multiplies the weight of a source by
the share of its tokens that is kept.
"""

import numpy as np

from diffmegatron.data.sampling.permutation import derive_key, uniform


def keep_long(
    lengths: np.ndarray, documents: np.ndarray, *, long_tokens: int, keep_short: float, seed: int
) -> np.ndarray:
    """Return a mask of the documents that are kept, bool ``[n]``.

    The paper keeps documents below 4096 estimated tokens with probability 0.1. Here tokens are
    counted.

    Args:
        lengths: tokens of each document, including end of document, ``[n]``.
        documents: document numbers ``[n]``, which with the seed determine the random numbers.
        long_tokens: documents of at least this many tokens (without end of document) are kept.
        keep_short: probability of keeping a shorter document; 1 keeps all.
        seed: seed of the choice of short documents.
    """
    if keep_short == 1:
        return np.ones(len(documents), dtype=bool)
    chance = uniform(derive_key("keep_short", seed), documents)
    return (lengths - 1 >= long_tokens) | (chance < keep_short)
