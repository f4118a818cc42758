"""RMSNorm for the layers of the local host."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """RMSNorm with weight, built as Megatron builds its norms.

    Megatron's own fallback, ``WrappedTorchNorm``, refuses sequence parallelism; under it this
    weight sees only its rank's part of the sequence, and the ``sequence_parallel`` mark has its
    gradient summed (:mod:`diffmegatron.optim.tensor_sums`).
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size], in the input's dtype."""
        return torch.nn.functional.rms_norm(hidden, (self.hidden_size,), self.weight, self.eps)
