"""Newton-Schulz iterations, which replace the singular values of a matrix by values of about 1."""

import torch
from torch import Tensor

# Coefficients of an iteration X <- a X + (b X X^T + c (X X^T)^2) X (Jordan et al., 2024; equal to
# those of torch.optim.Muon). Singular values converge to a range of about 0.7 to 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Return approximately U V^T of each matrix U S V^T; ``matrices`` is [n, rows, columns].

    The result has the dtype of ``matrices``, in which all products are computed. A zero matrix
    remains zero.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
