"""Export of networks with layers of several kinds, as this package's class MixedDiffForCausalLM."""

from collections.abc import Iterable, Mapping
from typing import Any

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.attention.kinds.layer_kinds import LAYERS, LayerKinds
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds.export import EXPORTS, export_of
from diffmegatron.hf.kinds.weight_rules import HuggingFace, WeightRule

MIXED = "mixed_diff"
# Model types whose attention the exported file modeling_mixed_diff.py can compute.
EXPORTED = ("llama", "mistral", "qwen3", "seed_oss", "grouped_diff", "diff_v2", "gated_llama")


class NetworkExport:
    """Export of a network's attention: that of its kind, or a class with a kind for each layer."""

    def __init__(self, attention: LayerKinds, hidden_size: int) -> None:
        """Raise UserError if a kind of the network has no export."""
        self.attention, self.hidden_size = attention, hidden_size
        exports = [export_of(each, hidden_size) for each in attention.kinds]
        self._exports = exports if len(exports) == 1 else [each.beside_others() for each in exports]

    def hugging_face(self) -> HuggingFace:
        """Return the model class of the export, or raise UserError if no class fits."""
        described = [each.hugging_face() for each in self._exports]
        if len(described) == 1:
            return described[0]
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

    def check(self) -> None:
        """Raise the UserError that an export of the network would raise before it starts."""
        self.hugging_face()
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


def export_problem(attention: LayerKinds, hidden_size: int) -> str | None:
    """Return the sentence with which an export of the network will be refused, or None."""
    try:
        NetworkExport(attention, hidden_size).check()
    except UserError as error:
        return str(error)
    return None


def exported_class(attention: LayerKinds, hidden_size: int) -> str | None:
    """Return the name of the model class of an export; None if the export will be refused."""
    if export_problem(attention, hidden_size) is not None:
        return None
    return NetworkExport(attention, hidden_size).hugging_face().architecture


def model_types() -> list[str]:
    """Return all Hugging Face model types that can be imported."""
    return [*(name for export in EXPORTS.values() for name in export.model_types), MIXED]


def read_attention(config: Mapping[str, Any]) -> LayerKinds:
    """Return the attention that a configuration with one of :func:`model_types` describes."""
    if config["model_type"] != MIXED:
        return LayerKinds(kinds=(_read_kind(config),))
    entries = config["layer_kinds"]
    return LayerKinds(
        kinds=tuple(_read_kind({**config, **each}) for each in entries),
        layers=tuple(each[LAYERS] for each in entries),
    )


def is_served(model_type: str) -> bool:
    """Return whether a model type has one attention call per layer, as serving engines require."""
    return all(each.is_served for each in EXPORTS.values() if model_type in each.model_types)


def _read_kind(config: Mapping[str, Any]) -> AttentionKind:
    name = config["model_type"]
    return next(each for each in EXPORTS.values() if name in each.model_types).read(config)
