"""The base class of all attention variants.

A variant, or *kind* of attention, is one class in one file of this package. Every layer has two
projections: the fused projection to queries, keys and values, and the output projection. The class
defines the other parameters of a layer and its forward pass. It also defines the recipe's section
with the sizes of the heads, the costs in memory and arithmetic, and the mapping to Hugging Face. No
other module depends on the name of a kind.

A differential kind subtracts a second softmax map from a first one. Signal heads are the query
heads of the first map, and noise heads are the query heads of the second map. In the shapes s is
the number of tokens, b the number of sequences, and d the number of channels of a query head.

Commands that only read a recipe import these files and must start fast. Functions that compute with
tensors therefore import torch themselves.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field

from diffmegatron.attention.kernels.costs import Sizes
from diffmegatron.attention.kernels.registry import BACKENDS, Backend
from diffmegatron.attention.variants.hugging_face import HuggingFace, WeightRule
from diffmegatron.attention.variants.layer import Context, Layer
from diffmegatron.attention.variants.projection_heads import Heads
from diffmegatron.errors import UserError
from diffmegatron.files import shorten
from diffmegatron.section import Section, SizeOrZero, divisors

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32 = 4
# Methods that compute a layer, and methods that map its weights to Hugging Face. A class that
# overrides a method of the first group must not inherit the second group (`Variant.check_export`).
COMPUTATION = ("normalize_qk", "gate", "forward", "current_lambda")
EXPORT = ("hugging_face", "weight_rules", "layer_rules")
# Name of the bias of the fused projection to queries, keys and values. All other parameters that a
# kind declares are outside the two projections.
QKV_BIAS = "linear_qkv.bias"
ContextCommunication = Literal["ring", "all_gather", "ulysses"]


Layers = tuple[range, ...]
"""Ranges of layer numbers; the first layer has number 0."""


def overlap(some: range, others: range) -> int:
    """Return the number of elements that two ranges have in common."""
    return max(0, min(some.stop, others.stop) - max(some.start, others.start))


class Constant(NamedTuple):
    """Initial values that are all equal to one number."""

    value: float


class Identity(NamedTuple):
    """Initial values of a square matrix: the identity times a number."""

    scale: float


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer's attention, other than the matrices of the two projections.

    Attributes:
        name: name under ``self_attention.``, or ``QKV_BIAS``.
        shape: shape of the unsharded parameter.
        initial: standard deviation of normally distributed initial values, or fixed initial values.
            With ``matrix``, initial values are chosen as for the network's other weight matrices.
        role: group for weight decay and for counting parameters.
        float32: whether a layer computes with the parameter's float32 values, even in a bf16 run.
        sharded: whether the first axis is cut into equal ranges, one per tensor-parallel rank in
            the order of the ranks. If false, each rank has the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    initial: float | Constant | Identity | Literal["matrix"]
    role: Literal["matrix", "bias", "norm", "lambda"]
    float32: bool = False
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.role not in ("matrix", "bias", "norm", "lambda"):
            raise UserError(
                f"parameter {self.name!r} has the role {self.role!r}; give matrix, bias, norm or "
                "lambda"
            )
        if not self.shape:
            raise UserError(f"parameter {self.name!r} has no axis; give the shape (1,) to a scalar")


@dataclass(frozen=True)
class Kernels:
    """Kernel properties that determine how many bytes a layer saves for the backward pass.

    Attributes:
        element: bytes of a number in the run's precision.
        device: device of the operations. Fused operations on a GPU save fewer tensors than the
            separate operations on a CPU.
        backend: name of the attention backend; never "auto".
        communication: method of communication between context-parallel ranks; None for one rank.
        context: number of context-parallel ranks.
        keys: number of keys in a row of scores, including masked keys, averaged over the rank's
            queries. With packed documents, the sequences of a microbatch are concatenated, so a row
            has the keys of the whole microbatch.
        has_mask: whether attention needs a mask that torch's ``is_causal`` cannot express. Packed
            documents need a mask, because a query sees only keys of its own document. An all-gather
            of keys needs a mask, because ``is_causal`` assumes that the first query and the first
            key have the same position.
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
    def keys_per_query(self) -> float:
        """Number of keys that this rank's attention calls receive, divided by its tokens.

        Some kernels save a copy of all keys and values of a call, so this is also the number of
        copies per token. Without an all-gather, the number is 1. With an all-gather, a rank makes
        two calls, one for each of its two chunks of queries. Each call receives the keys of all
        positions up to the end of its chunk.
        """
        if self.communication != "all_gather":
            return 1.0
        # With P context-parallel ranks a sequence has 2 * P equal chunks. Rank r has the tokens of
        # chunks r and 2 * P - 1 - r. The two calls receive the keys of r + 1 and of 2 * P - r
        # chunks. The sum is 2 * P + 1 chunks of keys, for two chunks of tokens.
        return (2 * self.context + 1) / 2

    def softmax_keys(self, heads: Heads, backend: Backend) -> float:
        """Return the bytes per token of the keys and values that softmax attention saves."""
        # Only torch's backends have `saves_bias`. If there is a mask, they copy the keys and values
        # for each query head, in each attention call.
        if self.has_mask and backend.saves_bias and heads.queries > heads.keys:
            return 2 * self.element * heads.query_channels * self.keys_per_query
        # After an all-gather, this rank saves the keys and values of all context-parallel ranks.
        whole = self.context if self.communication == "all_gather" else 1
        return 2 * self.element * heads.key_channels * whole


class Variant(Section, ABC):
    """A kind of attention and its sizes: the section ``model.attention`` of a recipe.

    ``num_heads`` and ``num_kv_heads`` count heads of this kind. In DIFF V1, for example, a head has
    two softmax maps, and a key-value head has two keys. If either ``num_heads`` or ``head_dim`` is
    missing, it is chosen so that the heads' outputs fill ``hidden_size``.

    Attributes:
        title: name of a network of this kind, for reports.
        output_width: width of a head's output, divided by the width of a query.
        operation: attention function of the kernels. "differential" has two maps and values of
            width 2d. "softmax" has one map; :meth:`forward` may subtract the outputs of some heads
            from the outputs of other heads.
        reads_hidden: whether :meth:`gate` uses the layer's normalised input.
        model_types: model types of Hugging Face that :meth:`from_hugging_face` accepts.
        can_mix: whether other layers of the network may have another kind.
        free_keys: keys of the section that a run may change when it starts from existing weights.
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

    @classmethod
    def with_files(
        cls, section: Mapping[str, Any], *, may_be_missing: bool = False
    ) -> Mapping[str, Any]:
        """Return a recipe's section in which names of files are replaced by the files' content.

        By default the section is returned unchanged.

        Args:
            may_be_missing: accept a file that does not exist yet. Values are then assumed for its
                content, and :attr:`assumption` describes them.

        Raises:
            UserError: a file cannot be read, or has an unexpected content.
        """
        return section

    def sized(self, hidden_size: int) -> Self:
        """Return the section with all sizes filled in.

        Raises:
            ValueError: neither ``num_heads`` nor ``head_dim`` is given, or a size does not fit.
        """
        sizes = {"num_heads": self.num_heads, "head_dim": self.head_dim}
        given = {name: size for name, size in sizes.items() if size}
        if not given:
            raise ValueError("model.attention has neither num_heads nor head_dim; give one of them")
        if len(given) == 1:
            ((name, size),) = given.items()
            missing = next(each for each in sizes if each != name)
            if hidden_size % (self.output_width * size):
                raise ValueError(
                    f"model.hidden_size {hidden_size} is not a multiple of {self._width_in_words()}"
                    f"model.attention.{name} {size}; give one that divides it, or {missing} too"
                )
            sizes[missing] = hidden_size // (self.output_width * size)
        # By default each group of ``ratio`` signal heads has its own key-value head. This is the
        # largest possible number, because a group shares its key-value head with its noise head.
        kv_heads = self.num_kv_heads or max(1, sizes["num_heads"] // self.ratio)
        sized = self.model_copy(update=sizes | {"num_kv_heads": kv_heads})
        sized.check()
        return sized

    @property
    def ratio(self) -> int:
        """Number r of signal heads per noise head; 1 without noise heads."""
        return 1

    def check(self) -> None:
        """Check that the sizes fit each other, after :meth:`sized` has filled them in.

        Raises:
            ValueError: a size does not fit.
        """
        if self.head_dim % 2:
            raise ValueError(
                f"model.attention.head_dim {self.head_dim} is odd; rotary embeddings rotate pairs "
                "of channels, so give an even number"
            )
        if self.num_heads % self.ratio:
            raise ValueError(
                f"model.attention.signal_per_noise {self.ratio} does not divide num_heads "
                f"{self.num_heads}, the signal heads; choose one of {_fits(self.num_heads)}"
            )
        most = self.num_heads // self.ratio
        if most % self.num_kv_heads:
            share = f" / signal_per_noise {self.ratio}" if self.ratio > 1 else ""
            raise ValueError(
                f"model.attention.num_kv_heads {self.num_kv_heads} does not divide num_heads "
                f"{self.num_heads}{share}; choose one of {_fits(most)}"
            )

    def of_layer(self, layer: int) -> "Variant":
        """Return the kind of a layer; layers are numbered from 0."""
        return self

    def by_kind(self, num_layers: int) -> "tuple[tuple[Variant, Layers], ...]":
        """Return a pair for every kind in the network: the kind, and the ranges of its layers."""
        return ((self, (range(num_layers),)),)

    @property
    def mixed_export_kind(self) -> "Variant":
        """Kind that replaces this kind in the export of a network with several kinds.

        The Hugging Face class for such networks supports only some kinds. A kind that the class
        does not support overrides this property. The replacement must compute the same function.
        """
        return self

    @property
    def heads_in_words(self) -> str:
        """Number and width of the heads, as ``plan`` prints them."""
        kv = self.num_kv_heads
        key_values = "" if kv == self.num_heads else f", {kv} key-value heads"
        return f"{self.num_heads} heads of {self.head_dim}{key_values}"

    def keys(self) -> dict[str, Any]:
        """Return the keys of the section with their values."""
        return self.model_dump()

    def check_layers(self, num_layers: int) -> None:
        """Raise ValueError if settings that list layers do not fit the number of layers."""
        return

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> "Variant":
        """Return the same kind with other sizes, for a rehearsal (a test run with small sizes)."""
        return self.model_copy(update=dict(sizes))

    def foundation(self) -> "Variant | None":
        """Return another kind of attention from whose weights a run may start, or None.

        A run may always start from weights of its own kind. Parameters that the other kind does not
        declare get the initial values of a new run.
        """
        return None

    @property
    def fingerprint(self) -> str | None:
        """Hash of the pretrained weights from which values of this section were computed, or None.

        If a run starts from weights of the kind :meth:`foundation`, these weights must have this
        hash. With None, their hash is not checked.
        """
        return None

    @property
    def assumption(self) -> str | None:
        """Sentence for ``plan`` about values that :meth:`with_files` assumed for a missing file.

        None if no values were assumed.
        """
        return None

    @property
    @abstractmethod
    def heads(self) -> Heads:
        """Layout of the heads in the projections."""

    @abstractmethod
    def baseline(self) -> "Variant":
        """Return softmax attention with as many channels as this kind, for a comparison.

        Summed over all heads, the outputs have as many channels in both kinds, and so have the keys
        and values. The number of heads and the width of one head may differ.
        """

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return a layer's parameters other than the two projections; by default none."""
        return ()

    def own_products(self, hidden_size: int) -> float:
        """Return the multiply-adds per token and layer of the matrices in :meth:`parameters`.

        If the layers differ, this is the mean over all layers.
        """
        own = self.parameters(hidden_size)
        return sum(math.prod(each.shape) for each in own if each.role == "matrix")

    @abstractmethod
    def products(self) -> int:
        """Return the multiply-adds of a layer's forward pass per (query, key) pair.

        This is the smallest number with which the equations can be computed. The backward pass
        needs twice as many.
        """

    def work(self, backend: str, *, deterministic: bool = False) -> tuple[int, int]:
        """Return the multiply-adds of a backend per (query, visible key) pair, for all heads.

        Args:
            backend: name of a backend for :attr:`operation`.
            deterministic: whether the backend sums gradients in a fixed order.

        Returns:
            Multiply-adds of the forward pass, and of the backward pass. The backward pass includes
            the second computation of the scores.
        """
        sizes = self.kernel_sizes(element=2, keys=0)._replace(is_deterministic=deterministic)
        return BACKENDS[self.operation][backend].work(sizes)

    def kernel_sizes(self, element: int, keys: float) -> Sizes:
        """Return the sizes for cost functions of kernels; :class:`Sizes` defines the arguments."""
        heads = self.heads
        return Sizes(element, self.head_dim, heads.queries, 0, heads.keys, keys)

    @abstractmethod
    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        """Return the bytes per token that all heads of a layer save for the backward pass.

        Returns:
            Two numbers: the bytes of q, k, v and the input of the output projection; and the bytes
            of all tensors between these, which selective recomputation computes again.
        """

    def kv_cache_bytes(self, element: int) -> int:
        """Return the bytes per token and layer of the key-value cache."""
        return 2 * self.heads.key_channels * element

    def normalize_qk(self, layer: Layer, query: "Tensor", key: "Tensor") -> "tuple[Tensor, Tensor]":
        """Normalise queries and keys [s, b, ..., d] before their rotation, if the kind does so."""
        return query, key

    def gate(self, layer: Layer, hidden: "Tensor") -> "Tensor | None":
        """Compute what :meth:`forward` needs from the layer's normalised input [s, b, hidden].

        Returns:
            A tensor [s, b, ...], or None if :meth:`forward` needs only q, k and v.
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
        """Compute the outputs of this rank's heads, [b, s, ...].

        All tensor-parallel ranks together have :attr:`Heads.output_channels` outputs per token.

        Args:
            query: rotated queries of this rank, [b, s, query heads, d].
            key, value: keys (rotated) and values of this rank, [b, s, key heads, d].
            gate: result of :meth:`gate`, transposed to [b, s, ...].
        """

    def current_lambda(self, layer: Layer) -> "Tensor | None":
        """Return lambda of a layer for the log as a 0-dim float32 tensor, or None.

        If lambda depends on the token, the result is None. Such a kind logs the mean of lambda with
        :meth:`Layer.observe`.
        """
        return None

    @abstractmethod
    def hugging_face(self, hidden_size: int) -> HuggingFace:
        """Return the description of the Hugging Face model class that computes this kind.

        Raises:
            UserError: no class computes these settings.
        """

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        """Return the kind that a configuration describes, the inverse of :meth:`hugging_face`."""
        # A kind without ``model_types`` does not need this method, so it is not abstract.
        raise NotImplementedError

    def subtracted_maps(self, attention: Any, maps: "Tensor", hidden: "Tensor") -> "Tensor":
        """Compute the attention maps after subtraction, for a layer of the Hugging Face class.

        By default the result is ``maps``, because a kind with one map per head subtracts nothing.

        Args:
            attention: attention module of the layer.
            maps: softmax maps of all query heads, float32 [query heads, query tokens, key tokens].
                The heads are in the order of the rows of the weight of ``q_proj``.
            hidden: input of the attention at the query tokens, [query tokens, hidden_size].

        Returns:
            Maps as float32 [num_heads, query tokens, key tokens].
        """
        return maps

    @property
    def map_pairs(self) -> tuple[tuple[int, int], ...]:
        """Signal map and noise map of each head, as indices into the query heads.

        The order of the query heads is that of ``maps`` in :meth:`subtracted_maps`. The tuple is
        empty for kinds with one map per head.
        """
        return ()

    @abstractmethod
    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[WeightRule]:
        """Return the rules that map the weights of a layer's attention to Hugging Face and back.

        ``ours`` and ``theirs`` are prefixes of the attention's weights here and at Hugging Face.
        """

    @property
    def inherited_export(self) -> str | None:
        """Name of the kind from whose class this class inherits its export, or None.

        An export consists of weight rules (:meth:`layer_rules` or :meth:`weight_rules`) and of
        :meth:`hugging_face`. If both are inherited, the result is the kind that defines the weight
        rules. The result is None if this class defines both, or if the parent class is not a
        :class:`Variant`.
        """
        rules = "layer_rules" if "layer_rules" in vars(type(self)) else "weight_rules"
        for name in (rules, "hugging_face"):
            owner = next(each for each in type(self).__mro__ if name in vars(each))
            if owner is not type(self):
                field = owner.model_fields["kind"] if issubclass(owner, Variant) else None
                return None if field is None else str(field.default)
        return None

    def check_export(self) -> None:
        """Refuse an inherited mapping to Hugging Face if the computation is overridden.

        Raises:
            UserError: a class overrides a method of ``COMPUTATION`` and inherits all of ``EXPORT``.
        """
        computing, exporting = (
            next(each for each in type(self).__mro__ if not vars(each).keys().isdisjoint(names))
            for names in (COMPUTATION, EXPORT)
        )
        if computing is exporting or not issubclass(computing, exporting):
            return
        overridden = ", ".join(name for name in COMPUTATION if name in vars(computing))
        raise UserError(
            f"kind {self.kind!r} cannot be exported: class {computing.__name__} defines "
            f"{overridden} and inherits the export of {exporting.__name__}; define weight_rules "
            f"in {computing.__name__}, or hugging_face if another class computes it"
        )

    def check_mixed_export(self) -> None:
        """Refuse an inherited :attr:`mixed_export_kind` if the computation is overridden.

        Raises:
            UserError: a class overrides a method of ``COMPUTATION`` and inherits the property.
        """
        computing, replacing = (
            next(each for each in type(self).__mro__ if not vars(each).keys().isdisjoint(names))
            for names in (COMPUTATION, ("mixed_export_kind",))
        )
        if replacing is Variant or computing is replacing or not issubclass(computing, replacing):
            return
        raise UserError(
            f"kind {self.kind!r} cannot be exported beside layers of other kinds: class "
            f"{computing.__name__} overrides the computation of {replacing.__name__} and inherits "
            f"its mixed_export_kind; define mixed_export_kind in {computing.__name__}"
        )

    def layer_rules(
        self, ours: str, theirs: str, hidden_size: int, *, layer: int, step: int
    ) -> list[WeightRule]:
        """Return the rules that map the attention weights of one layer at one step.

        By default these are :meth:`weight_rules`.

        Args:
            layer: global number of the layer, from 1.
            step: number of optimizer steps that produced the weights.
        """
        return self.weight_rules(ours, theirs, hidden_size)

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield warnings about doubtful settings, one sentence each.

        Args:
            parameters: number of parameters of the network without embeddings.
            lr: peak learning rate.
        """
        return iter(())

    def _width_in_words(self) -> str:
        return "" if self.output_width == 1 else f"{self.output_width} x "


def _fits(number: int) -> str:
    return shorten(str(divisors(number)))
