"""The registry of attention variants, and the parser of a recipe's section ``model.attention``.

The kind of a variant is its name in a recipe.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from diffmegatron.attention.variants.base import Variant
from diffmegatron.attention.variants.dex import Dex
from diffmegatron.attention.variants.diff_v1 import DiffV1
from diffmegatron.attention.variants.diff_v2 import DiffV2
from diffmegatron.attention.variants.grouped import Grouped
from diffmegatron.attention.variants.pattern import Pattern
from diffmegatron.attention.variants.softmax import Softmax
from diffmegatron.files import shorten

__all__ = ["VARIANTS", "Variant", "model_types", "of_model_type", "read_variant", "register"]

VARIANTS: dict[str, type[Variant]] = {}
# Renamed members of `Variant`: dict from the former name, which a user's class may still define, to
# the present name in the error message.
RENAMED = {
    "attend": "forward, whose tensors are [b, s, ...],",
    "normalised": "normalize_qk",
    "kept_bytes": "saved_bytes",
    "mixes": "can_mix",
    "beside_others": "mixed_export_kind",
}


def register(variant: type[Variant]) -> type[Variant]:
    """Register a variant under the default value of its field ``kind``; usable as a decorator.

    Raises:
        ValueError: another class has the same kind, or the class defines a member under a former
            name (a key of ``RENAMED``).
    """
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

    Args:
        section: mapping with a ``kind``, or a list of such mappings for a ``Pattern`` of several
            kinds. A ``Variant`` is returned unchanged.

    Raises:
        ValueError: the section is of another type, or a kind is missing or unknown.
        ValidationError: a key or value does not fit the kind.
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
    values: dict[str, Any] = dict(section)
    kind = values.get("kind")
    if kind is None:
        raise ValueError(f"model.attention.kind is missing; give one of {kinds}")
    if not isinstance(kind, str) or kind not in VARIANTS:
        near = difflib.get_close_matches(str(kind), VARIANTS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}, of {kinds}?" if near else f"give one of {kinds}"
        if not near:
            hint += ", or name the file of a kind of your own with --import"
        raise ValueError(f"model.attention.kind is {shorten(repr(kind))}; {hint}")
    return VARIANTS[kind].model_validate(values)
