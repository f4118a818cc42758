"""The registry of kinds of attention, and the reader of a recipe's section of one kind."""

import difflib
from collections.abc import Mapping
from typing import TypeVar

from diffmegatron.files import shorten

from .kind import AttentionKind

KINDS: dict[str, type[AttentionKind]] = {}
Own = TypeVar("Own", bound=AttentionKind)


def register(own: type[Own]) -> type[Own]:
    """Register a class under the default value of its field ``kind``; usable as a decorator.

    Raises:
        ValueError: the class lacks a member, or its ``kind`` belongs to another class.
    """
    kind = own.model_fields["kind"].default
    if not isinstance(kind, str):
        raise ValueError(
            f"class {own.__name__} has no kind; give its field kind a default, which is the value "
            "of model.attention.kind in recipes"
        )
    lacking = sorted(own.__abstractmethods__) + ([] if hasattr(own, "title") else ["title"])
    if lacking:
        raise ValueError(
            f"class {own.__name__} lacks {', '.join(lacking)}; define what docs/variants.md lists "
            "as the members of a kind"
        )
    if KINDS.setdefault(kind, own) is not own:
        raise ValueError(f"attention kind {kind!r} is {KINDS[kind].__name__}'s; choose another")
    return own


def read_kind(section: object, context: Mapping[str, bool] | None = None) -> AttentionKind:
    """Return the kind of attention of a section of a recipe, or raise ValueError.

    ``context`` is pydantic's validation context. An `AttentionKind` is returned unchanged.
    """
    if isinstance(section, AttentionKind):
        return section
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
    return KINDS[kind].model_validate(dict(section), context=context)
