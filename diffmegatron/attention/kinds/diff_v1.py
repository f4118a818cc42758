"""DIFF V1: the Differential Transformer of Ye et al., ICLR 2025 (arXiv 2410.05258).

The equation is that of ``two_maps.py`` with r = 1: each signal head has a noise head of its own.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from typing_extensions import override

from .two_maps import VectorLambda

# The paper's models above LARGE_MODEL parameters use the learning rate LARGE_MODEL_LR (appendix E).
LARGE_MODEL, LARGE_MODEL_LR = 5e9, 7.5e-5


class DiffV1(VectorLambda):
    """Differential heads with as many noise heads as signal heads."""

    kind: Literal["diff_v1"] = "diff_v1"

    title: ClassVar[str] = "Diff Transformer"

    @override
    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield a warning for each setting that differs from the paper and is often a mistake."""
        heads = f"model.attention.num_heads {self.num_heads}"
        if self.num_heads < 8:
            yield (
                f"{heads} is fewer than the 8 of the paper's smallest models; its authors advise "
                "more than 8 differential heads"
            )
        if self.heads.output_channels < hidden_size:
            yield (
                f"{heads} x 2 x head_dim {self.head_dim} is {self.heads.output_channels}, narrower "
                f"than hidden_size {hidden_size}; num_heads counts differential heads, so halve it "
                "once only"
            )
        if self.head_dim > 128:
            yield (
                f"model.attention.head_dim {self.head_dim} is above the paper's 128; num_heads "
                f"counts differential heads, so halve it once only: {hidden_size / 256:g} heads of "
                "128 fill hidden_size"
            )
        if not self.headwise_norm:
            yield (
                "model.attention.headwise_norm is off; without it the paper's 1.4B model ended at "
                "a validation loss of 3.122 instead of 3.062 (table 6)"
            )
        if parameters > LARGE_MODEL and lr > LARGE_MODEL_LR:
            yield (
                f"optimizer.lr {lr:g} is above the {LARGE_MODEL_LR:g} that the paper takes from "
                "6.8B on; loss spikes with a rising gradient norm were reported at 7B"
            )
