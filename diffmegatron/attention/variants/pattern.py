"""Layers of several kinds: ``model.attention`` as a list whose entries name their layers."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self

from pydantic import SerializationInfo, SerializeAsAny, model_serializer
from typing_extensions import override

from diffmegatron.attention.variants import hugging_face as hf
from diffmegatron.attention.variants.base import (
    Context,
    Kernels,
    Layer,
    Layers,
    Parameter,
    Variant,
    overlap,
)
from diffmegatron.attention.variants.projection_heads import Heads
from diffmegatron.errors import UserError
from diffmegatron.files import shorten

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = "layers"
# Model types whose attention the exported file modeling_mixed_diff.py can build.
EXPORTED = ("llama", "grouped_diff", "diff_v2")
_RANGES = re.compile(r"\d{1,10}(-\d{1,10})?(, *\d{1,10}(-\d{1,10})?)*")


class Pattern(Variant):
    """Several kinds of attention, each for some of the layers.

    A recipe lists the kinds with their layers::

        model:
          attention:
            - {kind: diff_v1, num_heads: 4, layers: 5-8}
            - {kind: softmax, num_heads: 8}

    ``layers`` has numbers and ranges, separated by commas. The first layer has number 1. The entry
    without ``layers`` has all remaining layers.

    Attributes:
        kinds: variant of each entry, in the order of the list; never a pattern itself.
        layers: text of each entry's ``layers`` in the recipe; None for the remaining layers.
    """

    kind: Literal["pattern"] = "pattern"
    kinds: tuple[SerializeAsAny[Variant], ...]
    layers: tuple[str | None, ...]

    title: ClassVar[str] = "Mixed"
    model_types: ClassVar[tuple[str, ...]] = ("mixed_diff",)
    can_mix: ClassVar[bool] = False

    @classmethod
    def read(cls, entries: Sequence[object], read: Callable[[object], Variant]) -> Variant:
        """Return the variant that the list ``model.attention`` of a recipe describes.

        Args:
            entries: sections of kinds, each with a key ``layers``, which one section may omit.

        Returns:
            The pattern, or the kind of a single entry without ``layers``.

        Raises:
            ValueError: the list is empty, a kind cannot be combined with others, ``layers`` is
                malformed, or several entries have no ``layers``.
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

    @model_serializer(mode="plain")
    def _as_list(self, info: SerializationInfo) -> list[dict[str, Any]]:
        return [
            ({} if layers is None else {LAYERS: layers}) | each.model_dump(mode=info.mode)
            for each, layers in zip(self.kinds, self.layers, strict=True)
        ]

    @property
    def heads_in_words(self) -> str:
        """Heads of every kind, as ``plan`` prints them."""
        return "; ".join(
            f"{each.kind} in {'the rest' if layers is None else f'layers {layers}'}: "
            f"{each.heads_in_words}"
            for each, layers in zip(self.kinds, self.layers, strict=True)
        )

    @property
    def ratio(self) -> int:
        """Least common multiple of the ratios of all kinds.

        The ratio of a kind is its number of signal heads per noise head, or 1 without noise heads.
        A multiple of the result is a valid ``num_heads`` for every kind.
        """
        return math.lcm(*(each.ratio for each in self.kinds))

    def keys(self) -> dict[str, Any]:
        """Return the keys and values of all entries.

        Each key is prefixed with the layers of its entry, such as ``[5-8].num_heads``.
        """
        return {
            f"[{layers or 'the rest'}].{key}": value
            for each, layers in zip(self.kinds, self.layers, strict=True)
            for key, value in each.model_dump().items()
        }

    @override
    def by_kind(self, num_layers: int) -> tuple[tuple[Variant, Layers], ...]:
        named = [None if each is None else _ranges(each) for each in self.layers]
        rest = tuple(_between([r for ranges in named if ranges for r in ranges], num_layers))
        return tuple(
            (each, rest if ranges is None else ranges)
            for each, ranges in zip(self.kinds, named, strict=True)
        )

    def sized(self, hidden_size: int) -> Self:
        """Return the pattern with all sizes of its kinds filled in.

        The pattern's own ``num_heads`` and ``num_kv_heads`` are the greatest common divisors over
        the kinds, because a parallel layout must divide the heads of every kind.

        Raises:
            ValueError: the kinds have different values of ``head_dim``.
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

    def check_layers(self, num_layers: int) -> None:
        """Check that every layer has exactly one entry, and that every entry has layers.

        Raises:
            ValueError: a layer does not exist, has two entries or none, or an entry has no layers.
        """
        taken: list[range] = []
        for text in self.layers:
            for each in () if text is None else _ranges(text):
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
        rest = list(_between(taken, num_layers))
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

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> Variant:
        """Return the pattern with other sizes and another number of layers.

        Each entry gets one layer, and the last entry also gets all remaining layers. If there are
        fewer layers than entries, the result is the last entry's kind.
        """
        kinds = [each.resized(num_layers, sizes) for each in self.kinds]
        if num_layers < len(kinds):
            return kinds[-1]
        *first, last = kinds
        layers = (*(str(number) for number in range(1, len(first) + 1)), None)
        return self.model_copy(update={"kinds": (*first, last), "layers": layers})

    @property
    def heads(self) -> Heads:
        """Layout of the first kind's heads.

        Megatron-core uses only the width of a head from it, which is the same for all kinds.
        """
        return self.kinds[0].heads

    def baseline(self) -> Variant:
        """Return a pattern of the kinds' baselines, or one baseline if all are equal."""
        baselines = tuple(each.baseline() for each in self.kinds)
        if all(each == baselines[0] for each in baselines):
            return baselines[0]
        return self.model_copy(update={"kinds": baselines})

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield the warnings of every kind, each sentence once."""
        sentences = [s for each in self.kinds for s in each.warnings(hidden_size, parameters, lr)]
        return iter(dict.fromkeys(sentences))

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return the description of this package's class for networks with several kinds.

        Raises:
            UserError: the class cannot compute one of the kinds.
        """
        entries = []
        for kind, layers in zip(self.kinds, self.layers, strict=True):
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
        from diffmegatron.attention.variants import of_model_type

        kinds = []
        for entry in config["layer_kinds"]:
            kind = of_model_type(entry["model_type"])
            assert kind is not None
            kinds.append(kind.from_hugging_face({**config, **entry}))
        return cls(kinds=tuple(kinds), layers=tuple(each[LAYERS] for each in config["layer_kinds"]))

    def layer_rules(
        self, ours: str, theirs: str, hidden_size: int, *, layer: int, step: int
    ) -> list[hf.WeightRule]:
        """Return the weight rules of one layer, from the kind of this layer.

        ``layer`` counts from 1, unlike in :meth:`of_layer`.
        """
        kind = self.of_layer(layer - 1).mixed_export_kind
        return kind.layer_rules(ours, theirs, hidden_size, layer=layer, step=step)

    def of_layer(self, layer: int) -> Variant:
        """Return the kind of a layer; layers are numbered from 0."""
        entries = list(zip(self.kinds, self.layers, strict=True))
        named = (k for k, text in entries if text and any(layer in r for r in _ranges(text)))
        rest = (kind for kind, text in entries if text is None)
        return next(named, None) or next(rest)

    @override
    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        self._refuse()

    @override
    def products(self) -> int:
        self._refuse()

    @override
    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        self._refuse()

    @override
    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        self._refuse()

    @override
    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[hf.WeightRule]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        # Callers must first get the kind of a layer from `of_layer` or `by_kind`, so a call of this
        # method is a bug.
        raise NotImplementedError("a pattern has no layers itself; call of_layer(layer) first")


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


def _between(taken: Sequence[range], num_layers: int) -> Iterator[range]:
    """Yield the ranges of layers that are not in ``taken``, in order."""
    free = 0
    for each in sorted(taken, key=lambda each: each.start):
        if each.start > free:
            yield range(free, each.start)
        free = max(free, each.stop)
    if free < num_layers:
        yield range(free, num_layers)
