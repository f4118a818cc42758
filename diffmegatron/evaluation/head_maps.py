"""Attention maps of a model's heads, computed from softmax maps by the model's type.

A model type is the key ``model_type`` in config.json. A head of a differential model has two
softmax maps: a signal map, and a noise map that is subtracted from it.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from transformers import PretrainedConfig
from typing_extensions import override

from diffmegatron.attention.kinds import AttentionKind, LayerKinds
from diffmegatron.attention.kinds.two_maps import LAMBDA_VECTORS, learned_lambda
from diffmegatron.hf.kinds.network import MIXED


class HeadMaps:
    """Maps of the heads of a layer; in this class a head has one softmax map.

    ``num_heads`` is the number of heads, and ``ratio`` that of signal heads per noise head.
    """

    def __init__(self, kind: AttentionKind) -> None:
        self.num_heads, self.ratio = kind.num_heads, kind.ratio

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Signal map and noise map of each head, as indices into ``maps`` of :meth:`subtracted`.

        Empty if a head has one map.
        """
        return ()

    def subtracted(self, attention: Any, maps: Tensor, hidden: Tensor) -> Tensor:
        """Return one map per head, [num_heads, query tokens, key tokens].

        In a differential model, it is the signal map minus lambda times the noise map.

        Args:
            attention: attention module of the layer.
            maps: softmax maps, float32 [query heads, query tokens, key tokens], in the order of the
                rows of ``q_proj``.
            hidden: input of the attention at the query tokens, [query tokens, hidden_size].
        """
        return maps


MAPS: dict[str, type[HeadMaps]] = {}
Maps = TypeVar("Maps", bound=type[HeadMaps])


def register_maps(*model_types: str) -> Callable[[Maps], Maps]:
    """Return a decorator that registers the maps of models of these types."""

    def register(maps: Maps) -> Maps:
        MAPS.update(dict.fromkeys(model_types, maps))
        return maps

    return register


@register_maps("diffllama", "grouped_diff")
class TwoMapsOfHeads(HeadMaps):
    """Maps of DiffLlama and of grouped attention, where all signal heads precede all noise heads.

    Lambda is computed from the four vectors and ``lambda_init`` of the module.
    """

    @property
    @override
    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple((n, self.num_heads + n // self.ratio) for n in range(self.num_heads))

    @override
    def subtracted(self, attention: Any, maps: Tensor, hidden: Tensor) -> Tensor:
        signal, noise = maps.split((self.num_heads, self.num_heads // self.ratio))
        vectors = (getattr(attention, name).float() for name in LAMBDA_VECTORS)
        lambda_ = learned_lambda(vectors) + attention.lambda_init
        return signal - lambda_ * noise.repeat_interleave(self.ratio, dim=0)


@register_maps("diff_v2")
class NoiseHeadMaps(HeadMaps):
    """Maps of DIFF V2: ``ratio`` signal heads, then their noise head, and lambda per token."""

    @property
    @override
    def pairs(self) -> tuple[tuple[int, int], ...]:
        r = self.ratio
        return tuple((n + n // r, n // r * (r + 1) + r) for n in range(self.num_heads))

    @override
    def subtracted(self, attention: Any, maps: Tensor, hidden: Tensor) -> Tensor:
        groups = maps.unflatten(0, (-1, self.ratio + 1))
        signal, noise = groups.split((self.ratio, 1), dim=1)
        lambda_ = attention.lambda_proj(hidden).float().sigmoid().T.unflatten(0, (-1, self.ratio))
        return (signal - lambda_.unsqueeze(-1) * noise).flatten(0, 1)


def maps_of(config: PretrainedConfig, attention: LayerKinds, layer: int) -> HeadMaps:
    """Return the maps of a layer, numbered from 0; ``attention`` is that of the configuration."""
    is_mixed = config.model_type == MIXED
    model_type = config.layer_kind(layer)["model_type"] if is_mixed else config.model_type
    return MAPS.get(model_type, HeadMaps)(attention.of_layer(layer))
