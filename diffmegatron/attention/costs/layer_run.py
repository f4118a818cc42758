"""Properties of a run that determine how many bytes a layer saves for the backward pass."""

from dataclasses import dataclass
from typing import Literal

from diffmegatron.attention.kernels.costs import FLOAT32
from diffmegatron.attention.kernels.registry import ContextCommunication, known_backend
from diffmegatron.attention.kinds.layer import Heads


@dataclass(frozen=True)
class LayerRun:
    """Properties of a run that determine how many bytes a layer saves for the backward pass.

    Attributes:
        element: bytes per element in the run's precision.
        device: device type; a GPU has fused operations, which save fewer tensors than on a CPU.
        backend: name of the attention backend; never "auto".
        communication: method of context parallelism; None with one context-parallel rank.
        context: number of context-parallel ranks.
        keys: mean number of keys for which a query has a score, including masked keys. With packed
            documents, the keys of all sequences in the microbatch are included.
        has_mask: whether attention needs a mask that torch's ``is_causal`` cannot express.
        recomputes_core: whether the backward pass computes attention again from q, k and v.
    """

    element: int
    device: Literal["gpu", "cpu"]
    backend: str
    communication: ContextCommunication | None
    context: int
    keys: float
    has_mask: bool
    recomputes_core: bool

    @property
    def key_shards(self) -> int:
        """Number of context-parallel shards of keys and values that this rank saves."""
        return self.context if self.communication == "all_gather" else 1

    @property
    def keys_per_query(self) -> float:
        """Number of keys in all attention calls of this rank, per token of this rank.

        After an all-gather over P ranks, rank r (from 0) makes two calls, each with one chunk of
        queries. The first call has r + 1 chunks of keys, and the second has 2 P - r.
        """
        return (2 * self.context + 1) / 2 if self.communication == "all_gather" else 1.0

    @property
    def copies_softmax_output(self) -> bool:
        """True if the output of softmax attention is copied before the next operation."""
        if self.communication in ("all_gather", "ulysses"):
            return True
        return self._has_bias

    @property
    def _has_bias(self) -> bool:
        """True if softmax attention receives its mask as a tensor."""
        return self.has_mask and known_backend("softmax", self.backend).saves_bias

    def softmax_bytes(self, heads: Heads) -> tuple[float, float]:
        """Return the bytes per token that softmax attention saves, as (inputs, results).

        The inputs are q, k and v. The results are the log-sum-exps and, if
        :attr:`copies_softmax_output` is true, a copy of the output.
        """
        queries, keys = self.element * heads.query_channels, self.element * heads.key_channels
        if self._has_bias and heads.queries > heads.keys:
            # With a mask, torch copies keys and values for each query head in each call.
            inputs = queries + 2 * queries * self.keys_per_query
        else:
            inputs = queries + 2 * keys * self.key_shards
        if self.communication is None:
            # v is a view of linear_qkv's output, so its other channels stay in memory too.
            inputs += self.element * heads.qkv_channels - keys
        copy = queries if self.copies_softmax_output else 0
        return inputs, copy + FLOAT32 * heads.queries
