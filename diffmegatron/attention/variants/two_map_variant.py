"""What DIFF V1 and grouped differential attention share: two maps, lambda, the headwise norm.

Ye et al., ICLR 2025, equations 1 to 3: head n is RMSNorm((A1_n - lambda A2_n) V) (1 - lambda_init).
Grouped, the maps of r signal heads share the map of one noise head.
"""

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from diffmegatron.attention.kernels import costs
from diffmegatron.attention.kernels.registry import DIFFERENTIAL
from diffmegatron.attention.variants.base import (
    FLOAT32,
    Constant,
    Context,
    Kernels,
    Layer,
    Parameter,
    Variant,
)
from diffmegatron.attention.variants.lambda_init import LambdaInit
from diffmegatron.attention.variants.projection_heads import Heads, Rows
from diffmegatron.attention.variants.softmax import Softmax

if TYPE_CHECKING:
    from torch import Tensor

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class TwoMaps(Variant):
    """``num_heads`` h outputs of 2d; each of ``num_kv_heads`` has two keys and one value of 2d.

    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init, one value per
    layer; the four vectors of d start at N(0, ``lambda_std``), the reference code's value.
    ``headwise_norm`` is the RMSNorm over each head's output, whose weight all heads share.
    """

    lambda_init: LambdaInit = LambdaInit()
    lambda_std: float = Field(default=0.1, ge=0)
    headwise_norm: bool = True

    output_width: ClassVar[int] = 2
    operation: ClassVar[Literal["differential", "softmax"]] = "differential"
    free_keys: ClassVar[frozenset[str]] = frozenset({"lambda_std"})

    @property
    def noise_heads(self) -> int:
        """Heads of the second map."""
        return self.num_heads // self.ratio

    @property
    def heads(self) -> Heads:
        """A block: signal queries, k1 and half of the value; noise queries, k2 and the other half.

        With one noise head per signal head these are two of Megatron-core's groups.
        """
        signal, noise = (n // self.num_kv_heads for n in (self.num_heads, self.noise_heads))
        rows: Rows = (("q", signal), ("k", 1), ("v", 1), ("q", noise), ("k", 1), ("v", 1))
        return Heads(self.head_dim, self.num_kv_heads, rows, 2 * signal)

    def baseline(self) -> Softmax:
        """2h heads, 2 h_kv key-value heads of the same d."""
        # Not validated: twice the most heads that a recipe may have is more than it may have.
        return Softmax.model_construct(
            num_heads=2 * self.num_heads,
            num_kv_heads=2 * self.num_kv_heads,
            head_dim=self.head_dim,
        )

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """The lambda vectors, and the norm's weight, whole on every rank and in float32.

        Rounding the vectors to bf16 would move lambda by 1e-3 to 5e-3.
        """
        vectors = [
            Parameter(name, (self.head_dim,), self.lambda_std, "lambda", float32=True)
            for name in LAMBDA_VECTORS
        ]
        norm = Parameter("head_norm", (2 * self.head_dim,), Constant(1.0), "norm", float32=True)
        return (*vectors, norm) if self.headwise_norm else tuple(vectors)

    def products(self) -> int:
        """As :class:`Variant` says: scores of d per head of either map, values of 2d for both.

        Kernels that keep the maps apart multiply both with the values (paper, appendix A).
        """
        maps = self.num_heads + self.noise_heads
        return (maps + 2 * self.num_heads) * self.head_dim

    def kept_bytes(self, kernels: Kernels) -> tuple[float, float]:
        """As :class:`Variant` says."""
        heads, sizes = self.heads, self.kernel_sizes(kernels.element, kernels.keys)
        outputs = heads.output_channels
        backend = DIFFERENTIAL[kernels.backend]
        fuses_norm = False
        if kernels.communication == "ring":
            core: float = costs.ring_saved(sizes) + kernels.element * outputs
        else:
            core = backend.saved(sizes)
            fuses_norm = backend.fuses_norm and not sizes.is_grouped
            core += kernels.element * outputs if backend.keeps_result else 0
        core += kernels.gathered(heads.key_channels, copies=3)
        if self.headwise_norm and not fuses_norm:
            # Its float32 input and one float32 per head; on a CPU the normalised input as well.
            core += FLOAT32 * (outputs * (2 if kernels.device == "cpu" else 1) + self.num_heads)
        projected = heads.query_channels + 2 * heads.key_channels + outputs
        return kernels.element * projected, core

    def kernel_sizes(self, element: int, keys: int) -> costs.Sizes:
        """As :class:`Variant` says."""
        return costs.Sizes(
            element, self.head_dim, self.num_heads, self.noise_heads, self.num_kv_heads, keys
        )

    def attend(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        """[s, b, num_heads, 2d]."""
        from diffmegatron.attention.kernels.api import HeadwiseNorm

        norm = None
        if self.headwise_norm:
            scale = 1.0 - self.lambda_init.of_layer(layer.layer_number)
            norm = HeadwiseNorm(layer.parameter("head_norm"), layer.norm_eps, scale)
        return context.differential(
            query,
            key,
            value,
            self.current_lambda(layer),
            signal_per_noise=self.ratio,
            norm=norm,
        )

    def current_lambda(self, layer: Layer) -> "Tensor":
        """lambda of a layer, a 0-dim float32 tensor: one value for all its heads."""
        import torch

        q1, k1, q2, k2 = (layer.parameter(name) for name in LAMBDA_VECTORS)
        initial = self.lambda_init.of_layer(layer.layer_number)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + initial

    @property
    def map_pairs(self) -> tuple[tuple[int, int], ...]:
        """As :class:`Variant` says: the classes have all signal heads before all noise heads."""
        return tuple((n, self.num_heads + n // self.ratio) for n in range(self.num_heads))

    def subtracted_maps(self, attention: Any, maps: "Tensor", hidden: "Tensor") -> "Tensor":
        """As :class:`Variant` says: the classes have all signal heads before all noise heads."""
        import torch

        signal, noise = maps.split((self.num_heads, self.noise_heads))
        q1, k1, q2, k2 = (getattr(attention, name).float() for name in LAMBDA_VECTORS)
        learned = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum())
        lambda_ = learned + attention.lambda_init
        return signal - lambda_ * noise.repeat_interleave(self.ratio, dim=0)
