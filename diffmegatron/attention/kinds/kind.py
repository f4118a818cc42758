"""The base class of the kinds of attention.

A kind of attention is one class in one file of this package: its keys in a recipe, the layout of
its heads, its parameters and its equation. Its costs (``attention/costs``), its export
(``hf/kinds``) and its attention maps (``evaluation/head_maps.py``) are separate objects.

A differential kind subtracts a second softmax map from a first one. Signal heads are the query
heads of the first map, noise heads the query heads of the second map. Import torch only inside
functions that compute with tensors, because reading a recipe imports this module and must be fast.

In shapes s is the number of positions on this context-parallel rank, b the number of sequences, and
d the width of a query head.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self, TypeVar

from pydantic import Field

from diffmegatron.attention.kernels.registry import Operation
from diffmegatron.files import shorten
from diffmegatron.section import Section, Size, SizeOrZero, divisors

from .layer import OUTPUT_GATE, Context, FusedHead, Heads, Layer, Parameter, numbered

if TYPE_CHECKING:
    from torch import Tensor


class AttentionKind(Section, ABC):
    """A kind of attention and its sizes: an entry of the section ``model.attention`` of a recipe.

    ``num_heads`` and ``num_kv_heads`` count heads of this kind. In DIFF V1, for example, a head has
    two softmax maps, and a key-value head has two keys. With a ``window``, a token sees only itself
    and the ``window - 1`` tokens before it. docs/variants.md lists all members.
    ``title`` is the name in reports. ``operation`` is the attention function of `Context` that
    :meth:`forward` calls.
    """

    kind: str
    num_heads: SizeOrZero = Field(
        default=0, description="number of heads, as the kind counts them; 0: what fills hidden_size"
    )
    num_kv_heads: SizeOrZero = Field(
        default=0, description="number of key-value heads; 0: the most that the kind allows"
    )
    head_dim: SizeOrZero = Field(
        default=0, description="channels of a query or key head; 0: what fills hidden_size"
    )
    window: Size | None = Field(
        default=None, description="tokens that a token sees, itself included; null: all before it"
    )

    title: ClassVar[str]
    operation: ClassVar[Operation] = "softmax"

    # The section of the recipe

    @property
    def ratio(self) -> int:
        """Number r of signal heads per noise head; 1 without noise heads."""
        return 1

    def check(self, num_layers: int) -> None:
        """Raise ValueError if settings do not fit each other or the number of layers.

        :func:`sized` has filled in the sizes.
        """
        return

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield a sentence for each doubtful setting.

        ``parameters`` is the number of parameters without the embeddings.
        """
        return iter(())

    def foundation(self) -> "Foundation | None":
        """Return another kind from whose weights a run of this kind may start, or None.

        A kind with a foundation cannot be one of several kinds of a network.
        """
        return None

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> Self:
        """Return a copy of this section for the small network that ``plan --rehearse`` runs.

        ``sizes`` has the network's ``num_heads``, ``num_kv_heads`` and ``head_dim``.
        """
        return self.model_copy(update=dict(sizes))

    # The network

    @property
    @abstractmethod
    def heads(self) -> Heads:
        """Layout of the heads in the projections."""

    @property
    def matrices(self) -> tuple[FusedHead, ...]:
        """Heads of a block of ``linear_qkv`` in order, with the matrices that the block fuses.

        Muon orthogonalizes these matrices separately. By default they are q, k and v, and g with a
        gate. The names are free. The log has the largest logits of the queries of the first matrix
        and of those of the second, or of all queries if they belong to more than two matrices.
        """
        return numbered(name for name, count in self.heads.rows for _ in range(count))

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the attention's parameters except the weights of its two linear layers."""
        return ()

    def from_hidden(self, layer: Layer, hidden: "Tensor") -> "Tensor | None":
        """Return the last argument of :meth:`forward`, [s, b, ...], or None.

        ``hidden`` is the normalised input of the layer, [s, b, hidden_size]; under sequence
        parallelism, this tensor-parallel rank's shard of s. Selective recomputation saves the
        result, and does not call this method again.
        """
        return None

    @abstractmethod
    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        from_hidden: "Tensor | None",
    ) -> "Tensor":
        """Return the outputs of this rank's heads, [b, s, ...]; the layer flattens axes after s.

        Args:
            query: rotated queries of this rank, [b, s, query heads, d].
            key, value: keys (rotated) and values of this rank, [b, s, key heads, d].
            from_hidden: result of :meth:`from_hidden`, transposed to [b, s, ...].
        """

    def current_lambda(self, layer: Layer) -> "Tensor | None":
        """Return the lambda of a layer, 0-dim float32; None without lambda or with one per token.

        The log shows this value.
        """
        return None

    @classmethod
    def current_lambdas(cls, layers: "Sequence[tuple[Self, Layer]]") -> "Sequence[Tensor] | None":
        """Return the lambdas of several layers (0-dim each), computed together, or None.

        ``layers`` has the layers of a virtual pipeline stage whose kinds have this class. The stage
        calls this method once per forward pass, and :meth:`forward` gets the layer's lambda as
        ``context.lambda_``. A GPU then launches as few kernels as for one layer.
        """
        return None


class Foundation(NamedTuple):
    """A kind from whose weights a run of another kind may start.

    ``fingerprint`` is the hash that the weights must have; None permits any weights.
    """

    kind: AttentionKind
    fingerprint: str | None


def reads_hidden(kind: AttentionKind) -> bool:
    """Return whether a kind or its gate computes with the layer's normalised input itself."""
    is_gated = any(each.name == OUTPUT_GATE for each in kind.parameters(1))
    return is_gated or type(kind).from_hidden is not AttentionKind.from_hidden


def window_in(kind: AttentionKind, length: int) -> int | None:
    """Return a kind's window, or None if it hides no token of a sequence of ``length`` tokens."""
    return None if kind.window is None or kind.window >= length else kind.window


def kind_in_words(kind: AttentionKind) -> str:
    """Return the name of a kind, and its window if it has one, such as "diff_v1, window 4,096"."""
    return kind.kind if kind.window is None else f"{kind.kind}, window {kind.window:,}"


Kind = TypeVar("Kind", bound=AttentionKind)


def sized(kind: Kind, hidden_size: int) -> Kind:
    """Return a kind with all sizes filled in, or raise ValueError if they do not fit."""
    heads, width = kind.num_heads, kind.head_dim
    if not heads and not width:
        raise ValueError("model.attention has neither num_heads nor head_dim; give one of them")
    if not heads or not width:
        given, missing = ("num_heads", "head_dim") if heads else ("head_dim", "num_heads")
        outputs = _output_width(kind)
        channels = outputs * (heads or width)
        if hidden_size % channels:
            factor = "" if outputs == 1 else f"{outputs} x "
            raise ValueError(
                f"model.hidden_size {hidden_size} is not a multiple of {factor}"
                f"model.attention.{given} {heads or width}; give one that divides it, or "
                f"{missing} too"
            )
        heads, width = (size or hidden_size // channels for size in (heads, width))
    # A noise head and its `ratio` signal heads must use the same key-value head.
    kv_heads = kind.num_kv_heads or max(1, heads // kind.ratio)
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": width}
    _check_sizes(**sizes, ratio=kind.ratio)
    return kind.model_copy(update=sizes)


def _output_width(kind: AttentionKind) -> int:
    """Return the width of a head's output, divided by ``head_dim``."""
    smallest = {"num_heads": kind.ratio, "num_kv_heads": 1, "head_dim": 1}
    return kind.model_copy(update=smallest).heads.output_channels // kind.ratio


def _check_sizes(num_heads: int, num_kv_heads: int, head_dim: int, ratio: int) -> None:
    if head_dim % 2:
        raise ValueError(
            f"model.attention.head_dim {head_dim} is odd; rotary embeddings rotate pairs of "
            "channels, so give an even number"
        )
    if num_heads % ratio:
        raise ValueError(
            f"model.attention.signal_per_noise {ratio} does not divide num_heads {num_heads}, the "
            f"signal heads; choose one of {_divisors(num_heads)}"
        )
    most = num_heads // ratio
    if most % num_kv_heads:
        share = f" / signal_per_noise {ratio}" if ratio > 1 else ""
        raise ValueError(
            f"model.attention.num_kv_heads {num_kv_heads} does not divide num_heads "
            f"{num_heads}{share}; choose one of {_divisors(most)}"
        )


def _divisors(number: int) -> str:
    return shorten(str(divisors(number)))
