"""The registry of kinds of attention, and the parser of a recipe's section ``model.attention``."""

import difflib
from collections.abc import Mapping

from diffmegatron.files import shorten

from .dex import Dex
from .diff_v1 import DiffV1
from .diff_v2 import DiffV2
from .grouped import Grouped
from .kind import AttentionKind
from .pattern import Pattern
from .softmax import Softmax

__all__ = ["KINDS", "AttentionKind", "model_types", "of_model_type", "read_kind", "register"]

KINDS: dict[str, type[AttentionKind]] = {}
# Former name of a member of `AttentionKind` -> its present name, as the error message writes it.
RENAMED = {
    "attend": "forward, whose tensors are [b, s, ...],",
    "normalised": "normalize_qk",
    "kept_bytes": "saved_bytes",
    "mixes": "can_mix",
    "beside_others": "mixed_export_kind",
}


def register(own: type[AttentionKind]) -> type[AttentionKind]:
    """Register a class under the default value of its field ``kind``; usable as a decorator."""
    for former, present in RENAMED.items():
        if former in vars(own):
            raise ValueError(
                f"class {own.__name__} defines {former}, which is not used any more; define "
                f"{present} instead (docs/variants.md)"
            )
    kind = own.model_fields["kind"].default
    if KINDS.setdefault(kind, own) is not own:
        raise ValueError(f"attention kind {kind!r} is {KINDS[kind].__name__}'s; choose another")
    return own


for each in (Softmax, DiffV1, DiffV2, Grouped, Dex):
    register(each)


def of_model_type(model_type: object) -> type[AttentionKind] | None:
    """Return the class of the kind that can import this Hugging Face model type, or None."""
    return next((kind for kind in _readable() if model_type in kind.model_types), None)


def model_types() -> list[str]:
    """Return all Hugging Face model types that at least one kind can import."""
    return [name for kind in _readable() for name in kind.model_types]


def _readable() -> list[type[AttentionKind]]:
    return [*KINDS.values(), Pattern]


def read_kind(section: object) -> AttentionKind:
    """Return the kind of a recipe's section ``model.attention``.

    The section is a mapping with a ``kind``, or a list of such mappings for a `Pattern`. A
    `AttentionKind` is returned unchanged. An invalid section raises ValueError.
    """
    if isinstance(section, AttentionKind):
        return section
    if isinstance(section, list):
        return Pattern.read(section, read_kind)
    kinds = ", ".join(KINDS)
    if not isinstance(section, Mapping):
        raise ValueError(
            f"model.attention is {shorten(repr(section))}; it takes a mapping with a kind of "
            f"{kinds}, such as {{kind: diff_v1, num_heads: 12}}, or a list of such mappings"
        )
    kind = section.get("kind")
    if kind is None:
        raise ValueError(f"model.attention.kind is missing; give one of {kinds}")
    if not isinstance(kind, str) or kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, n=1, cutoff=0.6)
        hint = f"give one of {kinds}, or name the file of a kind of your own with --import"
        if near:
            hint = f"did you mean {near[0]!r}, of {kinds}?"
        raise ValueError(f"model.attention.kind is {shorten(repr(kind))}; {hint}")
    return KINDS[kind].model_validate(dict(section))
