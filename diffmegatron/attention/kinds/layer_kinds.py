"""The section ``model.attention``: ranges of layers, each with its kind of attention."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from pydantic import SerializationInfo, SerializeAsAny, model_serializer

from diffmegatron.files import shorten
from diffmegatron.section import FREE, Section

from .kind import AttentionKind, Foundation, sized
from .registry import read_kind
from .softmax import transformer_of

LAYERS = "layers"
_Own = TypeVar("_Own", bound="LayerKinds")
_RANGES = re.compile(r"\d{1,10}(-\d{1,10})?(, *\d{1,10}(-\d{1,10})?)*")


def overlap(some: range, others: range) -> int:
    """Return the number of elements that two ranges have in common."""
    return max(0, min(some.stop, others.stop) - max(some.start, others.start))


class LayerKinds(Section):
    """The kinds of attention of a network, each for some of the layers.

    ``kinds`` and ``layers`` have one element per entry of a recipe's list. ``layers`` has numbers
    and ranges of layers, counted from 1. An entry without layers has None, and takes all remaining
    layers. A recipe with one kind may have its mapping in place of the list::

        attention: [{kind: diff_v1, num_heads: 4, layers: 5-8}, {kind: softmax, num_heads: 8}]
    """

    kinds: tuple[SerializeAsAny[AttentionKind], ...]
    layers: tuple[str | None, ...] = (None,)

    @classmethod
    def read(cls, section: object, context: Mapping[str, bool] | None = None) -> Self:
        """Return the kinds of a section ``model.attention``, or raise ValueError.

        ``context`` is pydantic's validation context. A `LayerKinds` is returned unchanged.
        """
        if isinstance(section, cls):
            return section
        kinds, layers = [], []
        for entry in section if isinstance(section, list) else [section]:
            values, given = entry, None
            if isinstance(section, list) and isinstance(entry, Mapping):
                values = {key: value for key, value in entry.items() if key != LAYERS}
                given = entry.get(LAYERS)
            layers.append(_layers_as_text(given))
            kinds.append(read_kind(values, context))
        if not kinds:
            raise ValueError("model.attention is an empty list; give at least one kind")
        for each in kinds:
            if len(kinds) > 1 and each.foundation() is not None:
                raise ValueError(
                    f"model.attention has kind {each.kind!r} in a list, which needs all layers; "
                    "give that kind alone"
                )
        if layers.count(None) > 1:
            raise ValueError(
                f"model.attention has {layers.count(None)} entries without layers; only one "
                "entry can take the remaining layers"
            )
        return cls(kinds=tuple(kinds), layers=tuple(layers))

    @model_serializer(mode="plain")
    def _as_section(self, info: SerializationInfo) -> dict[str, Any] | list[dict[str, Any]]:
        dumped = [
            ({} if layers is None else {LAYERS: layers})
            | ({"kind": kind.kind} if len(self.kinds) > 1 else {})
            | kind.model_dump(mode=info.mode, exclude_defaults=info.exclude_defaults)
            for kind, layers in self._entries
        ]
        return dumped if len(self.kinds) > 1 else dumped[0]

    @property
    def _entries(self) -> list[tuple[AttentionKind, str | None]]:
        return list(zip(self.kinds, self.layers, strict=True))

    # Sizes

    def sized(self, hidden_size: int, num_layers: int) -> Self:
        """Return the kinds with all sizes filled in; raise ValueError if a setting does not fit."""
        kinds = tuple(sized(each, hidden_size) for each in self.kinds)
        widths = sorted({each.head_dim for each in kinds})
        if len(widths) > 1:
            raise ValueError(
                f"model.attention has kinds of head_dim {', '.join(map(str, widths))}; all layers "
                "use the same rotary angles, so give all kinds one head_dim"
            )
        for each in kinds:
            each.check(num_layers)
        _check_layers(self.layers, num_layers)
        layers = self.layers if len(kinds) > 1 else (None,)
        return self.model_copy(update={"kinds": kinds, "layers": layers})

    @property
    def head_dim(self) -> int:
        """Width of a query head in every layer."""
        return self.kinds[0].head_dim

    @property
    def num_heads(self) -> int:
        """Greatest common divisor of the kinds' numbers of heads."""
        return math.gcd(*(each.num_heads for each in self.kinds))

    @property
    def num_kv_heads(self) -> int:
        """Greatest common divisor of the kinds' numbers of key-value heads.

        A tensor-parallel size must divide the heads of every kind.
        """
        return math.gcd(*(each.num_kv_heads for each in self.kinds))

    # Layers

    def by_kind(self, num_layers: int) -> tuple[tuple[AttentionKind, tuple[range, ...]], ...]:
        """Return every kind in the network with the ranges of its layers, numbered from 0."""
        taken = [each for text in filter(None, self.layers) for each in _ranges(text)]
        rest = _between(taken, num_layers)
        return tuple(
            (kind, rest if text is None else _ranges(text)) for kind, text in self._entries
        )

    def of_layer(self, layer: int) -> AttentionKind:
        """Return the kind of a layer; layers are numbered from 0."""
        named = (k for k, text in self._entries if text and any(layer in r for r in _ranges(text)))
        rest = (kind for kind, text in self._entries if text is None)
        return next(named, None) or next(rest)

    # Names

    @property
    def kind(self) -> str:
        """Name of the kind of all layers, or "pattern"."""
        return self.kinds[0].kind if len(self.kinds) == 1 else "pattern"

    @property
    def title(self) -> str:
        """Name in reports of the kind of all layers, whatever their windows, or "Mixed"."""
        kinds = without_windows(self).kinds
        return kinds[0].title if len(kinds) == 1 else "Mixed"

    @property
    def heads_in_words(self) -> str:
        """Number and width of the heads, as ``plan`` prints them."""
        if len(self.kinds) == 1:
            return _heads_in_words(self.kinds[0])
        return "; ".join(
            f"{kind.kind} in {'the rest' if layers is None else f'layers {layers}'}: "
            f"{_heads_in_words(kind)}"
            for kind, layers in self._entries
        )

    def keys(self) -> dict[str, Any]:
        """Return the settings as key -> value; with several kinds a key is ``[5-8].num_heads``."""
        return {
            f"{prefix}{key}": value
            for prefix, kind in self._prefixed
            for key, value in kind.model_dump().items()
        }

    @property
    def free_keys(self) -> frozenset[str]:
        """Names of keys that may differ in a run that starts from existing weights."""
        return frozenset(
            f"{prefix}{key}"
            for prefix, kind in self._prefixed
            for key, field in type(kind).model_fields.items()
            if FREE in field.metadata
        )

    @property
    def _prefixed(self) -> list[tuple[str, AttentionKind]]:
        if len(self.kinds) == 1:
            return [("", self.kinds[0])]
        return [(f"[{layers or 'the rest'}].", kind) for kind, layers in self._entries]

    # Other networks

    def baseline(self) -> Self:
        """Return the Transformer of each kind, or of all layers if these are equal."""
        return _with_kinds(self, map(transformer_of, self.kinds))

    @property
    def foundation(self) -> Foundation | None:
        """Kind from whose weights a run may start in place of this one; None with several kinds."""
        return self.kinds[0].foundation()

    def resized(self, num_layers: int, sizes: Mapping[str, int], window: int) -> Self:
        """Return the kinds of the small network that ``plan --rehearse`` runs.

        All windows become ``window``. Each entry has one layer, and the last entry has all
        remaining layers. With fewer layers than entries, all layers have the kind of the last
        entry.
        """
        resized = (each.resized(num_layers, sizes) for each in self.kinds)
        kinds = tuple(
            each if each.window is None else each.model_copy(update={"window": window})
            for each in resized
        )
        if num_layers < len(kinds):
            kinds = kinds[-1:]
        layers = (*map(str, range(1, len(kinds))), None)
        return self.model_copy(update={"kinds": kinds, "layers": layers})

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield the warnings of all kinds, each once."""
        sentences = [s for each in self.kinds for s in each.warnings(hidden_size, parameters, lr)]
        return iter(dict.fromkeys(sentences))


def without_windows(attention: LayerKinds) -> LayerKinds:
    """Return the kinds without windows, or one kind for all layers if these are then equal."""
    kinds = (each.model_copy(update={"window": None}) for each in attention.kinds)
    return _with_kinds(attention, kinds)


def _with_kinds(attention: _Own, kinds: Iterable[AttentionKind]) -> _Own:
    each, *others = kinds
    if all(other == each for other in others):
        return attention.model_copy(update={"kinds": (each,), "layers": (None,)})
    return attention.model_copy(update={"kinds": (each, *others)})


def _heads_in_words(kind: AttentionKind) -> str:
    kv = kind.num_kv_heads
    key_values = "" if kv == kind.num_heads else f", {kv} key-value heads"
    window = "" if kind.window is None else f", window {kind.window:,}"
    return f"{kind.num_heads} heads of {kind.head_dim}{key_values}{window}"


def _check_layers(layers: tuple[str | None, ...], num_layers: int) -> None:
    taken: list[range] = []
    for text in filter(None, layers):
        for each in _ranges(text):
            if not 0 <= each.start < each.stop <= num_layers:
                raise ValueError(
                    f"model.attention has layers {shorten(repr(text))}, and model.num_layers "
                    f"is {num_layers}; give numbers from 1 to {num_layers}, the smaller first"
                )
            if any(overlap(each, other) for other in taken):
                raise ValueError(
                    f"model.attention has layers {shorten(repr(text))}, of which another entry "
                    "names some; give each layer one kind"
                )
            taken.append(each)
    rest = _between(taken, num_layers)
    if rest and None not in layers:
        raise ValueError(
            f"model.attention names no kind for layer {rest[0].start + 1}; leave layers out of "
            "one entry, which then has the rest"
        )
    if not rest and None in layers:
        raise ValueError(
            f"model.attention names all {num_layers} layers, and an entry without layers "
            "is left with none; take it out"
        )


def _layers_as_text(given: object) -> str | None:
    if given is None:
        return None
    text = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
    if not isinstance(text, str) or not _RANGES.fullmatch(text):
        raise ValueError(
            f"model.attention has layers {shorten(repr(given))}; give numbers from 1, such as 3, "
            "'5-8' or '1, 5-8'"
        )
    return text


def in_layer_order(kinds: LayerKinds, num_layers: int) -> LayerKinds:
    """Return the kinds in the order of their first layers, each with all of its layers.

    Patterns that give every layer the same kind become equal.
    """
    found: list[tuple[AttentionKind, list[range]]] = []
    for kind, ranges in kinds.by_kind(num_layers):
        same = next((each for other, each in found if other == kind), None)
        if same is None:
            found.append((kind, [*ranges]))
        else:
            same += ranges
    if len(found) == 1:
        return kinds.model_copy(update={"kinds": (found[0][0],), "layers": (None,)})
    found.sort(key=lambda entry: min(each.start for each in entry[1]))
    return kinds.model_copy(
        update={
            "kinds": tuple(kind for kind, _ in found),
            "layers": tuple(_as_text(ranges) for _, ranges in found),
        }
    )


def _ranges(text: str) -> tuple[range, ...]:
    """Return the layers of a text such as "1, 5-8" as ranges that count layers from 0."""
    ranges = []
    for each in text.split(","):
        first, _, last = each.strip().partition("-")
        ranges.append(range(int(first) - 1, int(last or first)))
    return tuple(ranges)


def _as_text(ranges: Iterable[range]) -> str:
    """Return ranges that count layers from 0 as a text such as "1, 5-8", joined and in order."""
    joined: list[range] = []
    for each in sorted(ranges, key=lambda each: each.start):
        if joined and joined[-1].stop == each.start:
            joined[-1] = range(joined[-1].start, each.stop)
        else:
            joined.append(each)
    return ", ".join(
        f"{each.start + 1}" if len(each) == 1 else f"{each.start + 1}-{each.stop}"
        for each in joined
    )


def _between(taken: Sequence[range], num_layers: int) -> tuple[range, ...]:
    """Return the ranges of layers that are not in ``taken``, in order."""
    free, found = 0, []
    end = range(num_layers, num_layers)
    for each in [*sorted(taken, key=lambda each: each.start), end]:
        if each.start > free:
            found.append(range(free, each.start))
        free = max(free, each.stop)
    return tuple(found)
