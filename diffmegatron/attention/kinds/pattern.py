"""Networks whose layers have different kinds of attention: ``model.attention`` as a list."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn, Self

from pydantic import SerializationInfo, SerializeAsAny, model_serializer
from typing_extensions import override

from diffmegatron.errors import UserError
from diffmegatron.files import shorten

from . import hugging_face as hf
from .kind import AttentionKind, overlap
from .layer import Heads

LAYERS = "layers"
# Model types whose attention the exported file modeling_mixed_diff.py can compute.
EXPORTED = ("llama", "grouped_diff", "diff_v2")
_RANGES = re.compile(r"\d{1,10}(-\d{1,10})?(, *\d{1,10}(-\d{1,10})?)*")


class Pattern(AttentionKind):
    """Several kinds of attention, each for some of the layers.

    A recipe has a list with one entry per kind, and counts layers from 1. ``kinds`` and ``layers``
    have one element per entry. An entry without layers has None, and takes all remaining layers::

        attention: [{kind: diff_v1, num_heads: 4, layers: 5-8}, {kind: softmax, num_heads: 8}]
    """

    kind: Literal["pattern"] = "pattern"
    kinds: tuple[SerializeAsAny[AttentionKind], ...]
    layers: tuple[str | None, ...]

    title: ClassVar[str] = "Mixed"
    model_types: ClassVar[tuple[str, ...]] = ("mixed_diff",)
    can_mix: ClassVar[bool] = False

    @classmethod
    def read(
        cls, entries: Sequence[object], read: Callable[[object], AttentionKind]
    ) -> AttentionKind:
        """Return the pattern of a recipe's list, or the kind of a single entry without ``layers``.

        ``read`` parses the section of one kind. An invalid list raises ValueError.
        """
        kinds, layers = [], []
        for entry in entries:
            values = dict(entry) if isinstance(entry, Mapping) else entry
            given = values.pop(LAYERS, None) if isinstance(values, dict) else None
            kinds.append(read(values))
            layers.append(_layers_as_text(given))
        if not kinds:
            raise ValueError("model.attention is an empty list; give at least one kind")
        if layers == [None]:
            return kinds[0]
        for each in kinds:
            if not each.can_mix:
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

    @property
    def _entries(self) -> list[tuple[AttentionKind, str | None]]:
        return list(zip(self.kinds, self.layers, strict=True))

    @model_serializer(mode="plain")
    def _as_list(self, info: SerializationInfo) -> list[dict[str, Any]]:
        return [
            ({} if layers is None else {LAYERS: layers}) | each.model_dump(mode=info.mode)
            for each, layers in self._entries
        ]

    def keys(self) -> dict[str, Any]:
        """Return the settings of all entries, with keys such as ``[5-8].num_heads``."""
        return {
            f"[{layers or 'the rest'}].{key}": value
            for each, layers in self._entries
            for key, value in each.model_dump().items()
        }

    @property
    @override
    def heads_in_words(self) -> str:
        return "; ".join(
            f"{each.kind} in {'the rest' if layers is None else f'layers {layers}'}: "
            f"{each.heads_in_words}"
            for each, layers in self._entries
        )

    @property
    def ratio(self) -> int:
        """Least common multiple of the kinds' ratios.

        A ratio is the number of signal heads (query heads of the first map) per noise head (query
        head of the second map). It is 1 for a kind without noise heads.
        """
        return math.lcm(*(each.ratio for each in self.kinds))

    def sized(self, hidden_size: int) -> Self:
        """Return the pattern with all sizes of its kinds filled in.

        The pattern's ``num_heads`` and ``num_kv_heads`` are the greatest common divisors over the
        kinds, because a tensor-parallel size must divide the heads of every kind.
        """
        kinds = tuple(each.sized(hidden_size) for each in self.kinds)
        widths = sorted({each.head_dim for each in kinds})
        if len(widths) > 1:
            raise ValueError(
                f"model.attention has kinds of head_dim {', '.join(map(str, widths))}; all layers "
                "use the same rotary angles, so give all kinds one head_dim"
            )
        return self.model_copy(
            update={
                "kinds": kinds,
                "head_dim": widths[0],
                "num_heads": math.gcd(*(each.num_heads for each in kinds)),
                "num_kv_heads": math.gcd(*(each.num_kv_heads for each in kinds)),
            }
        )

    @override
    def check_layers(self, num_layers: int) -> None:
        taken: list[range] = []
        for text in filter(None, self.layers):
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
        if rest and None not in self.layers:
            raise ValueError(
                f"model.attention names no kind for layer {rest[0].start + 1}; leave layers out of "
                "one entry, which then has the rest"
            )
        if not rest and None in self.layers:
            raise ValueError(
                f"model.attention names all {num_layers} layers, and an entry without layers "
                "is left with none; take it out"
            )

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> AttentionKind:
        """Return a copy of this section for the small network that ``plan --rehearse`` runs.

        Each entry has one layer, and the last entry has all remaining layers. If there are fewer
        layers than entries, return the kind of the last entry.
        """
        kinds = tuple(each.resized(num_layers, sizes) for each in self.kinds)
        if num_layers < len(kinds):
            return kinds[-1]
        layers = (*map(str, range(1, len(kinds))), None)
        return self.model_copy(update={"kinds": kinds, "layers": layers})

    @override
    def by_kind(self, num_layers: int) -> tuple[tuple[AttentionKind, tuple[range, ...]], ...]:
        taken = [each for text in filter(None, self.layers) for each in _ranges(text)]
        rest = _between(taken, num_layers)
        return tuple(
            (each, rest if text is None else _ranges(text)) for each, text in self._entries
        )

    @override
    def of_layer(self, layer: int) -> AttentionKind:
        named = (k for k, text in self._entries if text and any(layer in r for r in _ranges(text)))
        rest = (kind for kind, text in self._entries if text is None)
        return next(named, None) or next(rest)

    def baseline(self) -> AttentionKind:
        """Return a pattern of the kinds' baselines, or one baseline if all are equal."""
        baselines = tuple(each.baseline() for each in self.kinds)
        if all(each == baselines[0] for each in baselines):
            return baselines[0]
        return self.model_copy(update={"kinds": baselines})

    @override
    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        sentences = [s for each in self.kinds for s in each.warnings(hidden_size, parameters, lr)]
        return iter(dict.fromkeys(sentences))

    @property
    def heads(self) -> Heads:
        """Heads of the first kind, for Megatron-core's configuration.

        Each layer uses the heads of its own kind.
        """
        return self.kinds[0].heads

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return this package's class MixedDiffForCausalLM and the keys of its configuration."""
        entries = []
        for kind, layers in self._entries:
            kind.check_mixed_export()
            described = kind.mixed_export_kind.hugging_face(hidden_size)
            if described.model_type not in EXPORTED:
                raise UserError(
                    f"model.attention has layers of kind {kind.kind!r} whose class at Hugging Face "
                    f"is {described.model_type!r}; an export with layers of several kinds can have "
                    f"{', '.join(EXPORTED)}"
                )
            entries.append({LAYERS: layers, "model_type": described.model_type, **described.config})
        shared = ("num_attention_heads", "num_key_value_heads")
        return hf.HuggingFace(
            "mixed_diff",
            "MixedDiffForCausalLM",
            {name: entries[0][name] for name in shared}
            | {"head_dim": self.head_dim, "layer_kinds": entries},
            remote_code=True,
        )

    @classmethod
    @override
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        from . import of_model_type

        kinds = []
        for entry in config["layer_kinds"]:
            kind = of_model_type(entry["model_type"])
            assert kind is not None
            kinds.append(kind.from_hugging_face({**config, **entry}))
        return cls(kinds=tuple(kinds), layers=tuple(each[LAYERS] for each in config["layer_kinds"]))

    @override
    def layer_rules(
        self, ours: str, theirs: str, hidden_size: int, *, layer: int, step: int
    ) -> list[hf.WeightRule]:
        kind = self.of_layer(layer - 1).mixed_export_kind
        return kind.layer_rules(ours, theirs, hidden_size, layer=layer, step=step)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a pattern has no layers itself; call of_layer(layer) first")

    parameters = products = saved_bytes = forward = weight_rules = _refuse


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


def _ranges(text: str) -> tuple[range, ...]:
    """Return the layers of a text such as "1, 5-8" as ranges that count layers from 0."""
    ranges = []
    for each in text.split(","):
        first, _, last = each.strip().partition("-")
        ranges.append(range(int(first) - 1, int(last or first)))
    return tuple(ranges)


def _between(taken: Sequence[range], num_layers: int) -> tuple[range, ...]:
    """Return the ranges of layers that are not in ``taken``, in order."""
    free, found = 0, []
    end = range(num_layers, num_layers)
    for each in [*sorted(taken, key=lambda each: each.start), end]:
        if each.start > free:
            found.append(range(free, each.start))
        free = max(free, each.stop)
    return tuple(found)
