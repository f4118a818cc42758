"""The registry of attention variants, and the parser of a recipe's section ``model.attention``."""

import difflib
from collections.abc import Mapping

from diffmegatron.files import shorten

from .base import Variant
from .dex import Dex
from .diff_v1 import DiffV1
from .diff_v2 import DiffV2
from .grouped import Grouped
from .pattern import Pattern
from .softmax import Softmax

__all__ = ["VARIANTS", "Variant", "model_types", "of_model_type", "read_variant", "register"]

VARIANTS: dict[str, type[Variant]] = {}
# Former name of a member of `Variant` -> its present name, as the error message writes it.
RENAMED = {
    "attend": "forward, whose tensors are [b, s, ...],",
    "normalised": "normalize_qk",
    "kept_bytes": "saved_bytes",
    "mixes": "can_mix",
    "beside_others": "mixed_export_kind",
}


def register(variant: type[Variant]) -> type[Variant]:
    """Register a variant under the default value of its field ``kind``; usable as a decorator."""
    for former, present in RENAMED.items():
        if former in vars(variant):
            raise ValueError(
                f"class {variant.__name__} defines {former}, which is not used any more; define "
                f"{present} instead (docs/variants.md)"
            )
    kind = variant.model_fields["kind"].default
    if VARIANTS.setdefault(kind, variant) is not variant:
        raise ValueError(f"attention kind {kind!r} is {VARIANTS[kind].__name__}'s; choose another")
    return variant


for each in (Softmax, DiffV1, DiffV2, Grouped, Dex):
    register(each)


def of_model_type(model_type: object) -> type[Variant] | None:
    """Return the variant class that can import this Hugging Face model type, or None."""
    return next((kind for kind in _readable() if model_type in kind.model_types), None)


def model_types() -> list[str]:
    """Return all Hugging Face model types that at least one variant can import."""
    return [name for kind in _readable() for name in kind.model_types]


def _readable() -> list[type[Variant]]:
    return [*VARIANTS.values(), Pattern]


def read_variant(section: object) -> Variant:
    """Return the variant of a recipe's section ``model.attention``.

    The section is a mapping with a ``kind``, or a list of such mappings for a `Pattern`. A
    `Variant` is returned unchanged. An invalid section raises ValueError.
    """
    if isinstance(section, Variant):
        return section
    if isinstance(section, list):
        return Pattern.read(section, read_variant)
    kinds = ", ".join(VARIANTS)
    if not isinstance(section, Mapping):
        raise ValueError(
            f"model.attention is {shorten(repr(section))}; it takes a mapping with a kind of "
            f"{kinds}, such as {{kind: diff_v1, num_heads: 12}}, or a list of such mappings"
        )
    kind = section.get("kind")
    if kind is None:
        raise ValueError(f"model.attention.kind is missing; give one of {kinds}")
    if not isinstance(kind, str) or kind not in VARIANTS:
        near = difflib.get_close_matches(str(kind), VARIANTS, n=1, cutoff=0.6)
        hint = f"give one of {kinds}, or name the file of a kind of your own with --import"
        if near:
            hint = f"did you mean {near[0]!r}, of {kinds}?"
        raise ValueError(f"model.attention.kind is {shorten(repr(kind))}; {hint}")
    return VARIANTS[kind].model_validate(dict(section))
