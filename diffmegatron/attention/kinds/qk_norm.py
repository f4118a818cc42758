"""The key ``qk_norm``: an RMSNorm of each query head and each key head before their rotation."""

from pydantic import Field

from .kind import AttentionKind
from .layer import QK_NORMS, Constant, Parameter


class QKNorm(AttentionKind):
    """A kind that can normalize queries and keys, which bounds the attention logits.

    ``qk_norm`` applies an RMSNorm with the weight ``q_norm`` [d] to each query head, and one with
    the weight ``k_norm`` [d] to each key head. As in Qwen3 (arXiv 2505.09388), all heads share the
    two weights; so do both maps of a differential kind. The layer applies the norms.
    """

    qk_norm: bool = Field(default=False, description="RMSNorm of each query and key head (Qwen3)")

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the weights of the norms if ``qk_norm`` is true, and the parameters of `super`."""
        names = QK_NORMS if self.qk_norm else ()
        norms = (Parameter(name, (self.head_dim,), Constant(1.0), "norm") for name in names)
        return (*norms, *super().parameters(hidden_size))
