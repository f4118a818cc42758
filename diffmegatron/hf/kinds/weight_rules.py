"""Rules that convert attention weights between this package and a transformers model class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from diffmegatron.attention.kinds.layer import OUTPUT_GATE, QK_NORMS
from diffmegatron.attention.kinds.two_maps import LAMBDA_VECTORS

if TYPE_CHECKING:
    from torch import Tensor

    from diffmegatron.attention.kinds.layer import Heads
    from diffmegatron.attention.kinds.output_gate import OutputGate
    from diffmegatron.attention.kinds.qk_norm import QKNorm

Shapes = Mapping[str, tuple[int, ...]]
Rearrange = Callable[..., tuple["Tensor", ...]]


class WeightRule(NamedTuple):
    """Conversion between a few weights of this package and the same weights of transformers.

    ``ours`` and ``theirs`` map names of weights to unsharded shapes. ``to_hf`` converts
    tensors from ``ours`` to ``theirs``, both in the order of the names. ``from_hf`` converts from
    ``theirs`` to ``ours``. With ``keep_fp32`` an export does not round the weights.
    """

    ours: Shapes
    theirs: Shapes
    to_hf: Rearrange
    from_hf: Rearrange
    keep_fp32: bool = False

    @property
    def folds(self) -> bool:
        """True if ``to_hf`` multiplies one weight into another; a bf16 export rounds the result."""
        return len(self.ours) > len(self.theirs)


@dataclass(frozen=True)
class HuggingFace:
    """A model class that computes a kind of attention, and keys of its configuration.

    Attributes:
        config: keys and values that config.json must have.
        fixed: additional keys and values of config.json. If the run started from a pretrained
            model, the export keeps that model's values of these keys.
        also: other model types with the same network and keys. If the run started from a pretrained
            model of such a type, the export has the type of that model.
        remote_code: whether the export contains the code of the class.
    """

    model_type: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    remote_code: bool = False


def head_keys(heads: "Heads") -> dict[str, Any]:
    """Return the keys of a configuration that describe the heads of the projections."""
    return {
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.keys,
        "head_dim": heads.head_dim,
    }


def same(ours: str, theirs: str, shape: tuple[int, ...], *, keep_fp32: bool = False) -> WeightRule:
    """Return the rule of a weight that is copied without changes."""
    return WeightRule({ours: shape}, {theirs: shape}, _unchanged, _unchanged, keep_fp32)


def _unchanged(weight: "Tensor") -> tuple["Tensor", ...]:
    return (weight,)


def qkv(
    ours: str, theirs: str, heads: "Heads", hidden_size: int, *, paired_values: bool = False
) -> WeightRule:
    """Return the rule that splits ``linear_qkv`` into ``q_proj``, ``k_proj`` and ``v_proj``.

    If a block has heads of one type in two places of ``Heads.rows``, the projection has the heads
    of the first place from all blocks, and then the heads of the second place. With
    ``paired_values``, ``v_proj`` instead has the values block by block. The logits of an
    elementwise gate become ``output_gate``, in the order of the output channels.
    """
    d = heads.head_dim
    projections = {part: OUTPUT_GATE if part == "g" else f"{part}_proj" for part in heads.parts}

    def orders() -> list["Tensor"]:
        """Return the heads of each projection, as head numbers in ``linear_qkv``."""
        import torch

        blocks = torch.arange(heads.qkv_channels // d).unflatten(0, (heads.blocks, -1))
        runs = blocks.split([count for _, count in heads.rows], dim=1)
        found = []
        for kind in projections:
            own = [run for run, (each, _) in zip(runs, heads.rows, strict=True) if each == kind]
            if kind == "g" or (kind == "v" and paired_values):
                own = [torch.cat(own, dim=1)]
            found.append(torch.cat([run.flatten() for run in own]))
        return found

    def split(fused: "Tensor") -> tuple["Tensor", ...]:
        by_head = fused.unflatten(0, (-1, d))
        return tuple(by_head[order].flatten(0, 1) for order in orders())

    def join(*projections: "Tensor") -> tuple["Tensor", ...]:
        import torch

        by_head = torch.cat(projections).unflatten(0, (-1, d))
        return (by_head[torch.cat(orders()).argsort()].flatten(0, 1),)

    return WeightRule(
        {f"{ours}.linear_qkv.weight": (heads.qkv_channels, hidden_size)},
        {
            f"{theirs}.{name}.weight": (heads.channels(part), hidden_size)
            for part, name in projections.items()
        },
        split,
        join,
    )


def qkv_bias(ours: str, theirs: str, heads: "Heads") -> WeightRule:
    """Return the rule that splits the bias of ``linear_qkv`` into three projections' biases."""
    rule = qkv(ours, theirs, heads, 1)

    def of_bias(shapes: Shapes) -> Shapes:
        return {f"{name.removesuffix('weight')}bias": shape[:1] for name, shape in shapes.items()}

    return rule._replace(ours=of_bias(rule.ours), theirs=of_bias(rule.theirs))


def output(ours: str, theirs: str, heads: "Heads", hidden_size: int) -> WeightRule:
    """Return the rule of the output projection, which is copied without changes."""
    shape = (hidden_size, heads.output_channels)
    return same(f"{ours}.linear_proj.weight", f"{theirs}.o_proj.weight", shape)


def qk_norms(ours: str, theirs: str, kind: "QKNorm") -> list[WeightRule]:
    """Return the rules of the weights of queries' and keys' norms; none without ``qk_norm``."""
    names = QK_NORMS if kind.qk_norm else ()
    return [same(f"{ours}.{name}", f"{theirs}.{name}.weight", (kind.head_dim,)) for name in names]


def headwise_gate(ours: str, theirs: str, kind: "OutputGate", hidden_size: int) -> list[WeightRule]:
    """Return the rule of a headwise gate's matrix; none with another gate or without a gate.

    The rule :func:`qkv` has the matrix of an elementwise gate.
    """
    if kind.output_gate != "headwise":
        return []
    shape = (kind.num_heads, hidden_size)
    return [same(f"{ours}.{OUTPUT_GATE}", f"{theirs}.{OUTPUT_GATE}.weight", shape)]


def lambda_vectors(ours: str, theirs: str, head_dim: int) -> list[WeightRule]:
    """Return the rules of the four lambda vectors of DIFF V1, which are copied without changes."""
    return [
        same(f"{ours}.{name}", f"{theirs}.{name}", (head_dim,), keep_fp32=True)
        for name in LAMBDA_VECTORS
    ]
