"""The kinds of attention, one file per kind, and their registry."""

from .dex import Dex
from .diff_v1 import DiffV1
from .diff_v2 import DiffV2
from .grouped import Grouped
from .kind import AttentionKind
from .layer_kinds import LayerKinds
from .registry import KINDS, read_kind, register
from .softmax import Softmax

__all__ = ["KINDS", "AttentionKind", "LayerKinds", "read_kind", "register"]

for each in (Softmax, DiffV1, DiffV2, Grouped, Dex):
    register(each)
