"""Grouped differential attention (Motif, arXiv 2510.06949): DIFF V1 with fewer noise heads.

The equation is that of ``two_maps.py``. Motif-2-12.7B has 32 signal heads, 8 noise heads, 16 keys
and 16 values of width 128. Its recipe has ``num_heads`` 32, ``signal_per_noise`` 4 and
``num_kv_heads`` 8: a key-value head has two keys.
"""

from typing import ClassVar, Literal

from pydantic import Field

from diffmegatron.section import Size

from .two_maps import VectorLambda


class Grouped(VectorLambda):
    """Differential heads in which r = ``signal_per_noise`` signal heads share one noise head.

    r = 1 is DIFF V1. The paper finds r = 3 and r = 4 best at equal FLOPs.
    """

    kind: Literal["grouped"] = "grouped"
    signal_per_noise: Size = Field(default=4, description="signal heads per noise head")

    title: ClassVar[str] = "Grouped Diff Transformer"

    @property
    def ratio(self) -> int:
        """Number r of signal heads per noise head."""
        return self.signal_per_noise
