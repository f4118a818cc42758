"""Length up-sampling (Fu et al., arXiv 2402.10171): keep all long and a few short documents."""

import numpy as np

from diffmegatron.data.sampling.permutation import derive_key, uniform


def keep_long(
    lengths: np.ndarray, documents: np.ndarray, *, long_tokens: int, keep_short: float, seed: int
) -> np.ndarray:
    """Return which of n documents are kept, bool ``[n]``.

    Fu et al. use ``long_tokens`` 4096 and ``keep_short`` 0.1.

    Args:
        lengths: int ``[n]``, tokens of each document with its end-of-document token.
        documents: int ``[n]``, index of each document in the corpus. This index and the seed
            decide whether a short document is kept.
        long_tokens: least length of a long document, without its end-of-document token.
        keep_short: probability of keeping a short document.
    """
    if keep_short == 1:
        return np.ones(len(documents), dtype=bool)
    chance = uniform(derive_key("keep_short", seed), documents)
    return (lengths - 1 >= long_tokens) | (chance < keep_short)
