"""The base class of exports, and the registry of the export of each kind of attention."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from diffmegatron.attention.kinds.kind import AttentionKind
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds.weight_rules import HuggingFace, WeightRule

Kind = TypeVar("Kind", bound=AttentionKind)


class Export(ABC, Generic[Kind]):
    """Conversion of the layers of one kind of attention to a class of Hugging Face, and back.

    ``model_types`` are the model types that ``diffmegatron import`` reads as this kind.
    ``is_served`` is whether their class has one attention call per layer, as engines require.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    is_served: ClassVar[bool] = True

    def __init__(self, kind: Kind, hidden_size: int) -> None:
        self.kind, self.hidden_size = kind, hidden_size

    @abstractmethod
    def hugging_face(self) -> HuggingFace:
        """Return the model class of an export, or raise UserError if no class fits the settings."""

    @abstractmethod
    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[WeightRule]:
        """Return the rules that map the weights of a layer to Hugging Face's class and back.

        Args:
            ours: prefix of the weights' names in this package.
            theirs: prefix in Hugging Face's class.
            layer: number of the layer, from 1.
            step: number of completed optimizer steps.
        """

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Kind:
        """Return the kind that a configuration describes, the inverse of :meth:`hugging_face`.

        Only classes with ``model_types`` need this method.
        """
        raise UserError(
            f"class {cls.__name__} has no method read, so model type {config.get('model_type')!r} "
            "cannot be imported; define the method, or leave model_types empty"
        )

    def beside_others(self) -> "Export[Any]":
        """Return the export of such layers in a network with layers of several kinds."""
        return self


EXPORTS: dict[type[AttentionKind], type[Export[Any]]] = {}
OwnExport = TypeVar("OwnExport", bound=type[Export[Any]])


def register_export(kind: type[AttentionKind]) -> Callable[[OwnExport], OwnExport]:
    """Return a decorator that registers the export of exactly this class of attention."""

    def register(export: OwnExport) -> OwnExport:
        EXPORTS[kind] = export
        return export

    return register


def export_of(kind: AttentionKind, hidden_size: int) -> Export[Any]:
    """Return the export of a kind, or raise UserError if none is registered."""
    export = EXPORTS.get(type(kind))
    if export is None:
        raise UserError(
            f"model.attention.kind {kind.kind!r} cannot be exported: no export is registered for "
            f"class {type(kind).__name__}; register one as docs/variants.md describes"
        )
    return export(kind, hidden_size)
