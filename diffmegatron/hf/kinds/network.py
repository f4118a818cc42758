"""Export of networks with layers of several kinds, as this package's class MixedDiffForCausalLM."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.attention.kinds.layer_kinds import LAYERS, LayerKinds, without_windows
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds.export import EXPORTS, export_of
from diffmegatron.hf.kinds.weight_rules import HuggingFace, WeightRule

MIXED = "mixed_diff"
# Model types whose attention the exported file modeling_mixed_diff.py can compute.
EXPORTED = (
    *("llama", "mistral", "qwen2", "qwen3", "seed_oss"),
    *("grouped_diff", "diff_v2", "gated_llama"),
)
# Model types with a window in the layers that ``layer_types`` lists. Mistral's window is in all.
WINDOWED = ("qwen2", "qwen3", "grouped_diff", "diff_v2", "gated_llama", MIXED)
ONLY_IMPORTED = (
    "model.attention has a window and qkv_bias, which only Qwen2's class computes, and "
    "transformers 5 loads Qwen's own tokenizer for it; only a run that started from a Qwen2 model "
    "can be exported"
)
FULL, SLIDING = "full_attention", "sliding_attention"


class NetworkExport:
    """Export of a network's attention: that of its kind, or a class with a kind for each layer."""

    def __init__(self, attention: LayerKinds, hidden_size: int, num_layers: int) -> None:
        """Raise UserError if a kind of the network has no export, or windows have two sizes."""
        self.attention, self.hidden_size = attention, hidden_size
        exports = [export_of(each, hidden_size) for each in attention.kinds]
        self._exports = exports if len(exports) == 1 else [each.beside_others() for each in exports]
        self._num_layers = num_layers
        sizes = sorted({each.window for each in attention.kinds if each.window is not None})
        if len(sizes) > 1:
            raise UserError(
                f"model.attention has windows of {' and '.join(map(str, sizes))} tokens, and a "
                "model of Hugging Face has one sliding_window; give all windows one size"
            )
        self._window = sizes[0] if sizes else None
        if self._window == 1:
            raise UserError(
                "model.attention.window 1 cannot be exported, because the cache of transformers "
                "fails with it; give at least 2"
            )

    def window_keys(self, model_type: str) -> dict[str, Any]:
        """Return the keys of a configuration that describe the windows of all layers."""
        if model_type == "mistral":
            return {"sliding_window": self._window}
        if model_type not in WINDOWED:
            return {}
        kinds = map(self.attention.of_layer, range(self._num_layers))
        types = [FULL if each.window is None else SLIDING for each in kinds]
        keys = {"sliding_window": self._window, "layer_types": types}
        if model_type in ("qwen2", "qwen3"):
            keys["use_sliding_window"] = self._window is not None
        return keys

    def hugging_face(self) -> HuggingFace:
        """Return the model class of the export, or raise UserError if no class fits.

        Its keys do not have the windows, which :meth:`window_keys` returns.
        """
        described = [each.hugging_face() for each in self._exports]
        is_everywhere = all(each.window is not None for each in self.attention.kinds)
        windowed = (*WINDOWED, "mistral") if is_everywhere else WINDOWED
        for kind, each in zip(self.attention.kinds, described, strict=True):
            if kind.window is not None and each.model_type not in windowed:
                raise UserError(
                    f"model.attention.window {kind.window} cannot be exported: model type "
                    f"{each.model_type!r}, which the export of kind {kind.kind!r} names, has no "
                    "windows in such layers"
                )
        if len(without_windows(self.attention).kinds) == 1:
            # The class of layers with a window can compute layers without one.
            kinds = zip(self.attention.kinds, described, strict=True)
            return max(kinds, key=lambda each: each[0].window is not None)[1]
        entries = []
        for kind, layers, each in zip(
            self.attention.kinds, self.attention.layers, described, strict=True
        ):
            if each.model_type not in EXPORTED:
                raise UserError(
                    f"model.attention has layers of kind {kind.kind!r} whose class at Hugging Face "
                    f"is {each.model_type!r}; an export with layers of several kinds can have "
                    f"{', '.join(EXPORTED)}"
                )
            keys = {**each.fixed, **each.config}
            entries.append({LAYERS: layers, "model_type": each.model_type, **keys})
        shared = ("num_attention_heads", "num_key_value_heads")
        return HuggingFace(
            MIXED,
            "MixedDiffForCausalLM",
            {name: entries[0][name] for name in shared}
            | {"head_dim": self.attention.head_dim, "layer_kinds": entries},
            remote_code=True,
        )

    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[WeightRule]:
        """Return the rules of the attention's weights in a layer; arguments as in `Export.rules`.

        Raises:
            UserError: the kind of the layer declares a parameter for which it has no rule.
        """
        kind = self.attention.of_layer(layer - 1)
        index = next(n for n, each in enumerate(self.attention.kinds) if each is kind)
        rules = self._exports[index].rules(ours, theirs, layer=layer, step=step)
        _check_parameters(kind, self.hidden_size, rules, ours)
        return rules

    def check(self, *, from_scratch: bool = False) -> None:
        """Raise the UserError that an export of the network would raise before it starts.

        Give ``from_scratch`` if the run starts from no weights, so from no pretrained model.
        """
        if self.hugging_face().model_type == "qwen2" and from_scratch:
            raise UserError(ONLY_IMPORTED)
        for kind, export in zip(self.attention.kinds, self._exports, strict=True):
            rules = export.rules("ours", "theirs", layer=1, step=0)
            _check_parameters(kind, self.hidden_size, rules, "ours")


def in_one_call(attention: LayerKinds, hidden_size: int) -> LayerKinds:
    """Return the same attention in kinds whose exported classes have one attention call a layer."""
    exports = [export_of(each, hidden_size).beside_others() for each in attention.kinds]
    return attention.model_copy(update={"kinds": tuple(each.kind for each in exports)})


def _check_parameters(
    kind: AttentionKind, hidden_size: int, rules: Iterable[WeightRule], ours: str
) -> None:
    known = {name for rule in rules for name in rule.ours}
    own = [each.name for each in kind.parameters(hidden_size)]
    if left_out := [name for name in own if f"{ours}.{name}" not in known]:
        raise UserError(
            f"model.attention.kind {kind.kind!r} cannot be exported: its export has no rule for "
            f"its parameter {', '.join(left_out)}; add one to the rules of its export"
        )


def export_problem(
    attention: LayerKinds, hidden_size: int, num_layers: int, *, from_scratch: bool = False
) -> str | None:
    """Return the sentence with which an export of the network will be refused, or None.

    Give ``from_scratch`` if the run starts from no weights. Otherwise this function assumes that a
    run whose class only a pretrained model has started from such a model.
    """
    try:
        NetworkExport(attention, hidden_size, num_layers).check(from_scratch=from_scratch)
    except UserError as error:
        return str(error)
    return None


def exported_class(
    attention: LayerKinds, hidden_size: int, num_layers: int, *, from_scratch: bool = False
) -> str | None:
    """Return the name of the model class of an export; None if the export will be refused."""
    if export_problem(attention, hidden_size, num_layers, from_scratch=from_scratch) is not None:
        return None
    return NetworkExport(attention, hidden_size, num_layers).hugging_face().architecture


def model_types() -> list[str]:
    """Return all Hugging Face model types that can be imported."""
    return [*(name for export in EXPORTS.values() for name in export.model_types), MIXED]


def read_attention(config: Mapping[str, Any]) -> LayerKinds:
    """Return the attention that a configuration with one of :func:`model_types` describes."""
    entries = [config]
    if config["model_type"] == MIXED:
        entries = [{**config, **each} for each in config["layer_kinds"]]
    attention = LayerKinds(
        kinds=tuple(map(_read_kind, entries)),
        layers=tuple(each.get(LAYERS) for each in entries),
    )
    window = config.get("sliding_window")
    return _with_windows(attention, [window if each else None for each in sliding_layers(config)])


def sliding_layers(config: Mapping[str, Any]) -> list[bool]:
    """Return for each layer of a configuration whether it has the window ``sliding_window``."""
    layers, model_type = config["num_hidden_layers"], config["model_type"]
    if model_type == "mistral":
        return [config["sliding_window"] is not None] * layers
    # Older exports of this package have no layer_types.
    types = config.get("layer_types") if model_type in WINDOWED else None
    return [each == SLIDING for each in types or [FULL] * layers]


def _with_windows(attention: LayerKinds, windows: Sequence[int | None]) -> LayerKinds:
    """Return the kinds with a window for each layer; split entries whose windows differ."""
    entries: dict[tuple[int, int | None], list[int]] = {}
    for number, (_, ranges) in enumerate(attention.by_kind(len(windows))):
        for layer in chain.from_iterable(ranges):
            # The recipe refuses layers beyond the last one.
            window = windows[layer] if layer < len(windows) else None
            entries.setdefault((number, window), []).append(layer + 1)
    kinds = (attention.kinds[number].model_copy(update={"window": w}) for number, w in entries)
    is_split = [number for number, _ in entries] != [*range(len(attention.kinds))]
    layers = map(_as_text, entries.values()) if is_split else attention.layers
    return LayerKinds(kinds=tuple(kinds), layers=tuple(layers))


def _as_text(numbers: Sequence[int]) -> str:
    """Return rising numbers as ranges, such as "1, 5-8"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    ranges = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in ranges)


def is_served(model_type: str) -> bool:
    """Return whether a model type has one attention call per layer, as serving engines require."""
    return all(each.is_served for each in EXPORTS.values() if model_type in each.model_types)


def _read_kind(config: Mapping[str, Any]) -> AttentionKind:
    name = config["model_type"]
    return next(each for each in EXPORTS.values() if name in each.model_types).read(config)
