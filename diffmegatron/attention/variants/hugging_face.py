"""Rules that convert attention weights between this package and a transformers model class.

Each variant (kind of attention) defines such rules. :class:`HuggingFace` describes the model class.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from diffmegatron.attention.variants.projection_heads import Heads

Shapes = Mapping[str, tuple[int, ...]]
Rearrange = Callable[..., tuple["Tensor", ...]]


class WeightRule(NamedTuple):
    """Conversion between a few weights of this package and the same weights of transformers.

    Attributes:
        ours: unsharded shape of each of this package's weights, by name.
        theirs: shape of each weight of the transformers model, by name.
        to_hf: function with one tensor argument per name in ``ours``, in that order. It returns one
            tensor per name in ``theirs``.
        from_hf: inverse of ``to_hf``.
        keep_fp32: whether the weights stay in float32 when an export rounds the other weights to
            bf16. This is for weights whose rounding would noticeably change the model's outputs.
    """

    ours: Shapes
    theirs: Shapes
    to_hf: Rearrange
    from_hf: Rearrange
    keep_fp32: bool = False

    @property
    def folds(self) -> bool:
        """True if ``to_hf`` multiplies one weight into another.

        In bf16 the exported model's logits then differ slightly from those in training. The export
        rounds the product of the weights, but training rounds each weight before the product.
        """
        return len(self.ours) > len(self.theirs)


@dataclass(frozen=True)
class HuggingFace:
    """The transformers model class that computes an attention variant, and its configuration.

    Attributes:
        model_type: model type in the configuration of an export, unless the run started from a
            pretrained model of a type in ``also``.
        architecture: name of the class.
        config: keys and values that the variant requires in the configuration of ``model_type`` and
            of every model type in ``also``.
        fixed: further keys and values for a new configuration of ``model_type``. They are not added
            if the export keeps the configuration of the pretrained model that the run started from.
        also: other model types whose classes compute the same network from the keys in ``config``.
            If a run started from a pretrained model of such a type, its export keeps this type.
        remote_code: whether the export contains the code of the class, because transformers lacks
            it.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    remote_code: bool = False


def same(ours: str, theirs: str, shape: tuple[int, ...], *, keep_fp32: bool = False) -> WeightRule:
    """Return the rule of a weight that is copied without changes."""
    return WeightRule({ours: shape}, {theirs: shape}, _unchanged, _unchanged, keep_fp32)


def qkv(
    ours: str, theirs: str, heads: "Heads", hidden_size: int, *, paired_values: bool = False
) -> WeightRule:
    """Return the rule that splits ``linear_qkv`` into ``q_proj``, ``k_proj`` and ``v_proj``.

    ``linear_qkv`` consists of blocks, and a block consists of runs of query, key or value heads
    (``Heads.rows``). If a block has two runs of queries, ``q_proj`` has the first run of every
    block, followed by the second run of every block. ``k_proj`` and ``v_proj`` have the same order.

    Args:
        ours, theirs: prefixes of weight names in this package and in the transformers model.
        paired_values: whether ``v_proj`` instead has all values of the first block, then all values
            of the second block, and so on.
    """
    d = heads.head_dim
    sizes = {"q": heads.queries, "k": heads.keys, "v": heads.keys}

    def is_paired(kind: str) -> bool:
        return kind == "v" and paired_values

    def split(fused: "Tensor") -> tuple["Tensor", ...]:
        import torch

        counts = [count for _, count in heads.rows]
        parts = fused.unflatten(0, (heads.blocks, -1, d)).split(counts, dim=1)
        projections = []
        for kind in "qkv":
            of_kind = [
                part for part, (each, _) in zip(parts, heads.rows, strict=True) if each == kind
            ]
            if is_paired(kind):
                of_kind = [torch.cat(of_kind, dim=1)]
            projections.append(torch.cat([part.flatten(0, 2) for part in of_kind]))
        return tuple(projections)

    def join(*projections: "Tensor") -> tuple["Tensor", ...]:
        import torch

        taken: dict[str, list[Tensor]] = {}
        for kind, weight in zip("qkv", projections, strict=True):
            counts = [count for each, count in heads.rows if each == kind]
            if is_paired(kind):
                parts = weight.unflatten(0, (heads.blocks, -1, d)).split(counts, dim=1)
            else:
                lengths = [heads.blocks * count * d for count in counts]
                parts = tuple(
                    part.unflatten(0, (heads.blocks, -1, d)) for part in weight.split(lengths)
                )
            taken[kind] = list(parts)
        rows = [taken[kind].pop(0) for kind, _ in heads.rows]
        return (torch.cat(rows, dim=1).flatten(0, 2),)

    return WeightRule(
        {f"{ours}.linear_qkv.weight": (heads.qkv_channels, hidden_size)},
        {f"{theirs}.{k}_proj.weight": (sizes[k] * d, hidden_size) for k in "qkv"},
        split,
        join,
    )


def qkv_bias(ours: str, theirs: str, heads: "Heads") -> WeightRule:
    """Return the rule that splits the bias of ``linear_qkv`` into three projections' biases."""
    rows = qkv(ours, theirs, heads, 1)

    def split(fused: "Tensor") -> tuple["Tensor", ...]:
        return tuple(part[:, 0] for part in rows.to_hf(fused[:, None]))

    def join(*biases: "Tensor") -> tuple["Tensor", ...]:
        (fused,) = rows.from_hf(*(bias[:, None] for bias in biases))
        return (fused[:, 0],)

    def of_bias(shapes: Shapes) -> Shapes:
        return {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in shapes.items()}

    return WeightRule(of_bias(rows.ours), of_bias(rows.theirs), split, join)


def output(ours: str, theirs: str, heads: "Heads", hidden_size: int) -> WeightRule:
    """Return the rule of the output projection, which is copied without changes."""
    shape = (hidden_size, heads.output_channels)
    return same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", shape)


def _unchanged(weight: "Tensor") -> tuple["Tensor", ...]:
    return (weight,)
