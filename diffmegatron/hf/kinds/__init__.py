"""Exports to Hugging Face's classes and imports from them, by kind of attention."""

from . import dex as dex
from . import diff_v1 as diff_v1
from . import diff_v2 as diff_v2
from . import grouped as grouped
from . import softmax as softmax
from .export import Export, register_export
from .network import (
    NetworkExport,
    export_problem,
    exported_class,
    in_one_call,
    is_served,
    model_types,
    read_attention,
)
from .weight_rules import HuggingFace, WeightRule

__all__ = [
    "Export",
    "HuggingFace",
    "NetworkExport",
    "WeightRule",
    "export_problem",
    "exported_class",
    "in_one_call",
    "is_served",
    "model_types",
    "read_attention",
    "register_export",
]
