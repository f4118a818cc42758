"""Length up-sampling (Fu et al., arXiv 2402.10171): keep all long and a few short documents.

The documents are selected when the document order of a run is built, not when the corpus is
prepared. Runs with different limits between short and long documents can therefore use the same
prepared corpus. With ``data.upsampling.mode: global``, samples.py also multiplies the weight of a
source by the share of its tokens that is kept.
"""

import numpy as np

from diffmegatron.data.sampling.permutation import derive_key, uniform


def keep_long(
    lengths: np.ndarray, documents: np.ndarray, *, long_tokens: int, keep_short: float, seed: int
) -> np.ndarray:
    """Return a mask of n documents, bool ``[n]``, which is True for documents that are kept.

    The paper keeps documents below 4096 tokens with probability 0.1, and only estimates their
    numbers of tokens. In this function ``lengths`` has the exact numbers.

    Args:
        lengths: int ``[n]``, number of tokens of each document, including the end-of-document
            token.
        documents: int ``[n]``, index of each document in the corpus. This index and the seed
            determine whether a short document is kept.
        long_tokens: a document is always kept if it has at least this many tokens; its
            end-of-document token does not count.
        keep_short: probability with which a shorter document is kept; 1 keeps all documents.
        seed: seed of the random numbers.
    """
    if keep_short == 1:
        return np.ones(len(documents), dtype=bool)
    chance = uniform(derive_key("keep_short", seed), documents)
    return (lengths - 1 >= long_tokens) | (chance < keep_short)
