"""The base class of the kinds of attention, and properties of a run that determine their costs.

A kind of attention is one class in one file of this package. A differential kind
subtracts a second softmax map from a first one. Signal heads are the query heads of the first map,
noise heads the query heads of the second map. Import torch only inside functions that compute with
tensors, because reading a recipe imports this module and must be fast.

In shapes s is the number of positions on this context-parallel rank, b the number of sequences, and
d the width of a query head.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from diffmegatron.attention.kernels.costs import FLOAT32, Sizes
from diffmegatron.attention.kernels.registry import BACKENDS, SOFTMAX
from diffmegatron.errors import UserError
from diffmegatron.files import shorten
from diffmegatron.section import Section, SizeOrZero, divisors

from .hugging_face import HuggingFace, WeightRule
from .layer import Constant as Constant
from .layer import Context, Heads, Layer, Parameter

if TYPE_CHECKING:
    from torch import Tensor

# A class that overrides a method of COMPUTATION can be exported only with its own method of EXPORT.
COMPUTATION = ("normalize_qk", "gate", "forward", "current_lambda")
EXPORT = ("hugging_face", "weight_rules", "layer_rules")
ContextCommunication = Literal["ring", "all_gather", "ulysses"]


def overlap(some: range, others: range) -> int:
    """Return the number of elements that two ranges have in common."""
    return max(0, min(some.stop, others.stop) - max(some.start, others.start))


@dataclass(frozen=True)
class Kernels:
    """Properties of a run that determine how many bytes a layer saves for the backward pass.

    Attributes:
        element: bytes per element in the run's precision.
        device: device type; a GPU has fused operations, which save fewer tensors than on a CPU.
        backend: name of the attention backend; never "auto".
        communication: method of context parallelism; None with one context-parallel rank.
        context: number of context-parallel ranks.
        keys: mean number of keys for which a query has a score, including masked keys. With packed
            documents, the keys of all sequences in the microbatch are included.
        has_mask: whether attention needs a mask that torch's ``is_causal`` cannot express.
        recomputes_core: whether the backward pass computes attention again from q, k and v.
    """

    element: int
    device: Literal["gpu", "cpu"]
    backend: str
    communication: ContextCommunication | None
    context: int
    keys: float
    has_mask: bool
    recomputes_core: bool

    @property
    def key_shards(self) -> int:
        """Number of context-parallel shards of keys and values that this rank saves."""
        return self.context if self.communication == "all_gather" else 1

    @property
    def keys_per_query(self) -> float:
        """Number of keys in all attention calls of this rank, per token of this rank.

        After an all-gather over P ranks, rank r (from 0) makes two calls, each with one chunk of
        queries. The first call has r + 1 chunks of keys, and the second has 2 P - r.
        """
        return (2 * self.context + 1) / 2 if self.communication == "all_gather" else 1.0

    @property
    def copies_softmax_output(self) -> bool:
        """True if the output of softmax attention is copied before the next operation."""
        if self.communication in ("all_gather", "ulysses"):
            return True
        return self.has_mask and SOFTMAX[self.backend].saves_bias

    def softmax_bytes(self, heads: Heads) -> tuple[float, float]:
        """Return the bytes per token that softmax attention saves, as (inputs, results).

        The inputs are q, k and v. The results are the log-sum-exps and, if
        :attr:`copies_softmax_output` is true, a copy of the output.
        """
        queries, keys = self.element * heads.query_channels, self.element * heads.key_channels
        if self.has_mask and SOFTMAX[self.backend].saves_bias and heads.queries > heads.keys:
            # With a mask, torch copies keys and values for each query head in each call.
            inputs = queries + 2 * queries * self.keys_per_query
        else:
            inputs = queries + 2 * keys * self.key_shards
        if self.communication is None:
            # v is a view of linear_qkv's output, so the unrotated q and k stay in memory too.
            inputs += queries + keys
        copy = queries if self.copies_softmax_output else 0
        return inputs, copy + FLOAT32 * heads.queries


class AttentionKind(Section, ABC):
    """A kind of attention and its sizes: the section ``model.attention`` of a recipe.

    ``num_heads`` and ``num_kv_heads`` count heads of this kind. In DIFF V1, for example, a head has
    two softmax maps, and a key-value head has two keys. docs/variants.md lists all members.
    ``output_width`` is the width of a head's output, divided by ``head_dim``. ``free_keys`` are the
    keys of the section that a run may change when it starts from existing weights.
    """

    kind: str
    num_heads: SizeOrZero = Field(default=0, description="0: what fills hidden_size")
    num_kv_heads: SizeOrZero = Field(default=0, description="0: the most that the kind allows")
    head_dim: SizeOrZero = Field(default=0, description="0: what fills hidden_size")

    title: ClassVar[str]
    output_width: ClassVar[int] = 1
    operation: ClassVar[Literal["differential", "softmax"]] = "softmax"
    reads_hidden: ClassVar[bool] = False
    model_types: ClassVar[tuple[str, ...]] = ()
    can_mix: ClassVar[bool] = True
    free_keys: ClassVar[frozenset[str]] = frozenset()

    # The section of the recipe

    @classmethod
    def with_files(
        cls, section: Mapping[str, Any], *, may_be_missing: bool = False
    ) -> Mapping[str, Any]:
        """Replace names of files in a recipe's section by the files' content.

        With ``may_be_missing``, the content of a missing file is assumed.
        """
        return section

    @property
    def assumption(self) -> str | None:
        """Sentence for ``plan`` about the values that :meth:`with_files` assumed, or None."""
        return None

    def sized(self, hidden_size: int) -> Self:
        """Return the section with all sizes filled in, or raise ValueError if they do not fit."""
        heads, width = self.num_heads, self.head_dim
        if not heads and not width:
            raise ValueError("model.attention has neither num_heads nor head_dim; give one of them")
        if not heads or not width:
            given, missing = ("num_heads", "head_dim") if heads else ("head_dim", "num_heads")
            channels = self.output_width * (heads or width)
            if hidden_size % channels:
                factor = "" if self.output_width == 1 else f"{self.output_width} x "
                raise ValueError(
                    f"model.hidden_size {hidden_size} is not a multiple of {factor}"
                    f"model.attention.{given} {heads or width}; give one that divides it, or "
                    f"{missing} too"
                )
            heads, width = (size or hidden_size // channels for size in (heads, width))
        # A noise head and its `ratio` signal heads must use the same key-value head.
        kv_heads = self.num_kv_heads or max(1, heads // self.ratio)
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": width}
        sized = self.model_copy(update=sizes)
        sized.check()
        return sized

    @property
    def ratio(self) -> int:
        """Number r of signal heads per noise head; 1 without noise heads."""
        return 1

    def check(self) -> None:
        """Raise ValueError if the sizes that :meth:`sized` filled in do not fit each other."""
        if self.head_dim % 2:
            raise ValueError(
                f"model.attention.head_dim {self.head_dim} is odd; rotary embeddings rotate pairs "
                "of channels, so give an even number"
            )
        if self.num_heads % self.ratio:
            raise ValueError(
                f"model.attention.signal_per_noise {self.ratio} does not divide num_heads "
                f"{self.num_heads}, the signal heads; choose one of {_divisors(self.num_heads)}"
            )
        most = self.num_heads // self.ratio
        if most % self.num_kv_heads:
            share = f" / signal_per_noise {self.ratio}" if self.ratio > 1 else ""
            raise ValueError(
                f"model.attention.num_kv_heads {self.num_kv_heads} does not divide num_heads "
                f"{self.num_heads}{share}; choose one of {_divisors(most)}"
            )

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError if settings that list layers do not fit the number of layers."""
        return

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> "AttentionKind":
        """Return a copy of this section for the small network that ``plan --rehearse`` runs.

        ``sizes`` has the network's ``num_heads``, ``num_kv_heads`` and ``head_dim``.
        """
        return self.model_copy(update=dict(sizes))

    def of_layer(self, layer: int) -> "AttentionKind":
        """Return the kind of a layer; layers are numbered from 0."""
        return self

    def by_kind(self, num_layers: int) -> "tuple[tuple[AttentionKind, tuple[range, ...]], ...]":
        """Return every kind in the network with the ranges of its layers, numbered from 0."""
        return ((self, (range(num_layers),)),)

    @property
    def heads_in_words(self) -> str:
        """Number and width of the heads, as ``plan`` prints them."""
        kv = self.num_kv_heads
        key_values = "" if kv == self.num_heads else f", {kv} key-value heads"
        return f"{self.num_heads} heads of {self.head_dim}{key_values}"

    def keys(self) -> dict[str, Any]:
        """Return the settings of the section as key -> value."""
        return self.model_dump()

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield a sentence for each doubtful setting.

        ``parameters`` is the number of parameters without the embeddings.
        """
        return iter(())

    @abstractmethod
    def baseline(self) -> "AttentionKind":
        """Return softmax attention with equally many output, key and value channels."""

    def foundation(self) -> "AttentionKind | None":
        """Return another kind from whose weights a run of this kind may start, or None."""
        return None

    @property
    def fingerprint(self) -> str | None:
        """Hash that the weights of :meth:`foundation` must have; None allows any weights."""
        return None

    # The network

    @property
    @abstractmethod
    def heads(self) -> Heads:
        """Layout of the heads in the projections."""

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the attention's parameters except the weights of its two linear layers."""
        return ()

    def normalize_qk(self, layer: Layer, query: "Tensor", key: "Tensor") -> "tuple[Tensor, Tensor]":
        """Normalise queries and keys [s, b, ..., d] before their rotation, if the kind does so."""
        return query, key

    def gate(self, layer: Layer, hidden: "Tensor") -> "Tensor | None":
        """Return an additional argument for :meth:`forward`, [s, b, ...], or None.

        ``hidden`` is the normalised input of the layer, [s, b, hidden_size]; under sequence
        parallelism, this tensor-parallel rank's shard of s.
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
        gate: "Tensor | None",
    ) -> "Tensor":
        """Return the outputs of this rank's heads, [b, s, ...]; the layer flattens axes after s.

        Args:
            query: rotated queries of this rank, [b, s, query heads, d].
            key, value: keys (rotated) and values of this rank, [b, s, key heads, d].
            gate: result of :meth:`gate`, transposed to [b, s, ...].
        """

    def current_lambda(self, layer: Layer) -> "Tensor | None":
        """Return the lambda of a layer, 0-dim float32; None without lambda or with one per token.

        The log shows this value.
        """
        return None

    # Costs

    def products(self) -> int:
        """Return the minimum multiply-adds per (query, key) pair of a layer's forward pass.

        By default each query head needs d multiply-adds for the score, and d for the weighted sum
        of the values.
        """
        return 2 * self.heads.query_channels

    def own_products(self, hidden_size: int) -> float:
        """Return the multiply-adds per token of the matrices in :meth:`parameters`."""
        own = self.parameters(hidden_size)
        return sum(math.prod(each.shape) for each in own if each.role == "matrix")

    def kernel_sizes(self, element: int, keys: float) -> Sizes:
        """Return the sizes for the cost functions in ``kernels/costs.py``.

        ``element`` and ``keys`` are those of :class:`Kernels`.
        """
        heads = self.heads
        return Sizes(element, self.head_dim, heads.queries, 0, heads.keys, keys)

    def work(self, backend: str, *, deterministic: bool = False) -> tuple[int, int]:
        """Return a backend's multiply-adds per (query, visible key) pair: forward and backward.

        ``deterministic`` makes the backward pass sum in a fixed order, which can cost more.
        """
        sizes = self.kernel_sizes(element=2, keys=0)._replace(is_deterministic=deterministic)
        return BACKENDS[self.operation][backend].work(sizes)

    @abstractmethod
    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        """Return the bytes per token that all heads of a layer save for the backward pass.

        The first number counts q, k, v and the input of the output projection. The second number
        counts the tensors in between, which selective recomputation computes again.
        """

    def kv_cache_bytes(self, element: int) -> int:
        """Return the bytes per token of a layer's key-value cache; ``element`` as in `Kernels`."""
        return 2 * self.heads.key_channels * element

    # Hugging Face

    @abstractmethod
    def hugging_face(self, hidden_size: int) -> HuggingFace:
        """Return the model class of an export, or raise UserError if no class fits the settings."""

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        """Return the kind that a configuration describes, the inverse of :meth:`hugging_face`."""
        # A kind without ``model_types`` does not need this method, so it is not abstract.
        raise NotImplementedError

    @abstractmethod
    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[WeightRule]:
        """Return the rules that map the weights of a layer to Hugging Face's class and back.

        ``ours`` is the prefix of the weights' names in this package, and ``theirs`` the prefix in
        Hugging Face's class.
        """

    def layer_rules(
        self, ours: str, theirs: str, hidden_size: int, *, layer: int, step: int
    ) -> list[WeightRule]:
        """Return the rules for layer number ``layer`` (from 1) after ``step`` optimizer steps."""
        return self.weight_rules(ours, theirs, hidden_size)

    @property
    def mixed_export_kind(self) -> "AttentionKind":
        """Equivalent kind that replaces this one in the export of a network with several kinds."""
        return self

    def subtracted_maps(self, attention: Any, maps: "Tensor", hidden: "Tensor") -> "Tensor":
        """Return one map per head, [num_heads, query tokens, key tokens].

        A differential kind returns each signal map minus lambda times its noise map.

        Args:
            attention: attention module of a layer of the Hugging Face class.
            maps: softmax maps, float32 [query heads, query tokens, key tokens], in the order of the
                rows of ``q_proj``.
            hidden: input of the attention at the query tokens, [query tokens, hidden_size].
        """
        return maps

    @property
    def map_pairs(self) -> tuple[tuple[int, int], ...]:
        """Signal map and noise map of each head, as indices into ``maps`` of `subtracted_maps`.

        Empty if a head has one map.
        """
        return ()

    @property
    def inherited_export(self) -> str | None:
        """Name of the kind from which weight rules or `hugging_face` are inherited, or None."""
        rules = "layer_rules" if "layer_rules" in vars(type(self)) else "weight_rules"
        owners = (self._owner(rules), self._owner("hugging_face"))
        inherited = next((owner for owner in owners if owner is not type(self)), None)
        if inherited is None or not issubclass(inherited, AttentionKind):
            return None
        return str(inherited.model_fields["kind"].default)

    def check_export(self) -> None:
        """Raise UserError if a class overrides a method of COMPUTATION but inherits its export."""
        computing, exporting = self._owner(*COMPUTATION), self._owner(*EXPORT)
        if computing is exporting or not issubclass(computing, exporting):
            return
        overridden = ", ".join(name for name in COMPUTATION if name in vars(computing))
        raise UserError(
            f"kind {self.kind!r} cannot be exported: class {computing.__name__} defines "
            f"{overridden} and inherits the export of {exporting.__name__}; define weight_rules "
            f"in {computing.__name__}, or hugging_face if another class computes it"
        )

    def check_mixed_export(self) -> None:
        """Raise UserError if a class overrides the computation but inherits `mixed_export_kind`.

        The method of `AttentionKind` may be inherited, because it returns ``self``.
        """
        computing, replacing = self._owner(*COMPUTATION), self._owner("mixed_export_kind")
        if (
            replacing is AttentionKind
            or computing is replacing
            or not issubclass(computing, replacing)
        ):
            return
        raise UserError(
            f"kind {self.kind!r} cannot be exported beside layers of other kinds: class "
            f"{computing.__name__} overrides the computation of {replacing.__name__} and inherits "
            f"its mixed_export_kind; define mixed_export_kind in {computing.__name__}"
        )

    def _owner(self, *members: str) -> type:
        """Return the most derived class that defines one of the members."""
        classes = type(self).__mro__
        return next(each for each in classes if not vars(each).keys().isdisjoint(members))


def _divisors(number: int) -> str:
    return shorten(str(divisors(number)))
