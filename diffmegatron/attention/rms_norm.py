"""RMSNorm for layers that use Megatron-core's own linear classes, not Transformer Engine's."""

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """RMSNorm with a weight and the constructor arguments of Megatron's norms.

    Megatron's own fallback, ``WrappedTorchNorm``, does not support sequence parallelism. Here the
    attribute ``sequence_parallel`` of the weight makes :mod:`diffmegatron.optim.tensor_sums` sum
    its gradient over the ranks, because each rank normalises only its shard of the sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden_size] over the last dimension, in the input's dtype."""
        return torch.nn.functional.rms_norm(hidden, (self.hidden_size,), self.weight, self.eps)
