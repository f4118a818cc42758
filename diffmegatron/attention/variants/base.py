"""The base of all attention variants: the interface that the rest of the system uses.

A variant is one class in one file of this package: a section of the recipe with its heads, the
parameters beside the two projections, costs, the forward of a layer, and the Hugging Face mapping.
No other module depends on a kind of attention by name.

These files are imported with the recipe, before torch: functions that compute import torch inside.
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
from diffmegatron.files import clipped
from diffmegatron.section import Section, SizeOrZero, divisors

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32 = 4
# The methods of a kind that decide what its layers compute, and those that map it to Hugging Face.
COMPUTATION = ("normalised", "gate", "forward", "current_lambda")
EXPORT = ("hugging_face", "weight_rules", "layer_rules")
# The one parameter that a projection holds itself, by the name that a variant declares it under.
QKV_BIAS = "linear_qkv.bias"
ContextCommunication = Literal["ring", "all_gather", "ulysses"]


Layers = tuple[range, ...]
"""Numbers of layers, from 0."""


def overlap(some: range, others: range) -> int:
    """Return how many numbers two ranges share."""
    return max(0, min(some.stop, others.stop) - max(some.start, others.start))


class Constant(NamedTuple):
    """Initial values that are all one number."""

    value: float


class Identity(NamedTuple):
    """Initial values of a square matrix: the identity times a number."""

    scale: float


@dataclass(frozen=True)
class Parameter:
    """A parameter of a layer's attention beside the matrices of the two projections.

    Attributes:
        name: under ``self_attention.``; ``QKV_BIAS`` is the bias of the first projection.
        shape: shape of the whole parameter.
        initial: standard deviation of normal initial values; values that are not random; or
            ``matrix``, for the recipe's initial values of weight matrices.
        role: group that determines weight decay and where the parameter is counted.
        float32: whether it is stored and used in float32 in every precision of a run.
        sharded: tensor-parallel ranks share its first axis as they share the blocks of heads;
            otherwise each holds it whole.
    """

    name: str
    shape: tuple[int, ...]
    initial: float | Constant | Identity | Literal["matrix"]
    role: Literal["matrix", "bias", "norm", "lambda"]
    float32: bool = False
    sharded: bool = False


@dataclass(frozen=True)
class Kernels:
    """Kernel properties that determine how many bytes a layer keeps for the backward pass.

    Attributes:
        element: bytes of a number in the run's precision.
        device: operations on a CPU keep tensors that the fused ones of a GPU do not.
        backend: name of the attention backend that runs; "auto" has been resolved.
        communication: how the context-parallel ranks communicate; None for one rank.
        context: number of context-parallel ranks.
        keys: number of keys in a query's row of scores, the mean over the rank's queries. With
            packed documents a row of scores has the keys of the whole microbatch.
        has_mask: whether attention needs more than a plain causal mask: for packed documents, and
            for an all-gather, whose chunks of queries end where the keys end.
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
        """Keys that a rank's calls of attention are given together, over its queries."""
        if self.communication != "all_gather":
            return 1.0
        # Up to the end of either chunk of the queries, a chunk from each half of the sequence.
        return (2 * self.context + 1) / 2

    def softmax_keys(self, heads: Heads, backend: Backend) -> float:
        """Return the bytes per token of the keys and values that ordinary attention keeps.

        Under a mask torch's kernels take no groups of queries: each query head has a copy then.
        """
        if self.has_mask and backend.keeps_bias and heads.queries > heads.keys:
            return 2 * self.element * heads.query_channels * self.keys_per_query
        whole = self.context if self.communication == "all_gather" else 1
        return 2 * self.element * heads.key_channels * whole


class Variant(Section, ABC):
    """A kind of attention and its sizes: the section ``model.attention`` of a recipe.

    ``num_heads`` and ``num_kv_heads`` are heads of that kind. Of ``num_heads`` and ``head_dim`` one
    may be left out; the heads' outputs then fill ``hidden_size``.
    """

    kind: str
    num_heads: SizeOrZero = Field(default=0, description="0: what fills hidden_size")
    num_kv_heads: SizeOrZero = Field(default=0, description="0: the most that the kind allows")
    head_dim: SizeOrZero = Field(default=0, description="0: what fills hidden_size")

    # What people call a network of it.
    title: ClassVar[str]
    # How wide the output of one of num_heads is, in widths of a query.
    output_width: ClassVar[int] = 1
    # What computes it: two maps over values twice as wide, or ordinary attention.
    operation: ClassVar[Literal["differential", "softmax"]] = "softmax"
    # Whether it reads the layer's normalised input itself.
    reads_hidden: ClassVar[bool] = False
    # The model types of Hugging Face whose configurations from_hugging_face reads.
    model_types: ClassVar[tuple[str, ...]] = ()
    # Whether other layers of the network may be of another kind.
    mixes: ClassVar[bool] = True
    # Its keys that say nothing of weights which exist: a run may start with those of other values.
    free_keys: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def with_files(
        cls, section: Mapping[str, Any], *, may_be_missing: bool = False
    ) -> Mapping[str, Any]:
        """Return a recipe's section with the content of the files that its keys name.

        Args:
            section: as the recipe says it.
            may_be_missing: a file that is not there yet is no mistake; :attr:`assumption` says
                what is taken in its place.

        Raises:
            UserError: one cannot be read, or is of another kind.
        """
        return section

    def sized(self, hidden_size: int) -> Self:
        """Return the section with every size filled in.

        Raises:
            ValueError: naming the key, its value and what would be right.
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
                    f"model.hidden_size {hidden_size} is no multiple of {self._width_in_words()}"
                    f"model.attention.{name} {size}; give one that divides it, or {missing} too"
                )
            sizes[missing] = hidden_size // (self.output_width * size)
        # No group of signal heads with their noise head lies across two key-value heads.
        kv_heads = self.num_kv_heads or max(1, sizes["num_heads"] // self.ratio)
        sized = self.model_copy(update=sizes | {"num_kv_heads": kv_heads})
        sized.check()
        return sized

    @property
    def ratio(self) -> int:
        """r, signal heads that share a noise head; 1 also where no head is noise."""
        return 1

    def check(self) -> None:
        """Check sizes that are all there.

        Raises:
            ValueError: naming the key, its value and what would be right.
        """
        if self.head_dim % 2:
            raise ValueError(
                f"model.attention.head_dim {self.head_dim} is odd; rotary embeddings turn pairs of "
                "channels"
            )
        if self.num_heads % self.ratio:
            raise ValueError(
                f"model.attention.signal_per_noise {self.ratio} does not divide num_heads "
                f"{self.num_heads}, the signal heads; one of {_fits(self.num_heads)} would"
            )
        most = self.num_heads // self.ratio
        if most % self.num_kv_heads:
            share = f" / signal_per_noise {self.ratio}" if self.ratio > 1 else ""
            raise ValueError(
                f"model.attention.num_kv_heads {self.num_kv_heads} does not divide num_heads "
                f"{self.num_heads}{share}; one of {_fits(most)} would"
            )

    def of_layer(self, layer: int) -> "Variant":
        """Return the kind of a layer, by its number from 0."""
        return self

    def by_kind(self, num_layers: int) -> "tuple[tuple[Variant, Layers], ...]":
        """Return every kind of the network's layers with the layers that are of it."""
        return ((self, (range(num_layers),)),)

    @property
    def beside_others(self) -> "Variant":
        """The kind that computes the same in an export whose layers are of several kinds."""
        return self

    @property
    def heads_in_words(self) -> str:
        """The number of heads and their width, as ``plan`` prints them."""
        kv = self.num_kv_heads
        key_values = "" if kv == self.num_heads else f", {kv} key-value heads"
        return f"{self.num_heads} heads of {self.head_dim}{key_values}"

    def keys(self) -> dict[str, Any]:
        """Return the keys of the section with their values."""
        return self.model_dump()

    def check_layers(self, num_layers: int) -> None:
        """Check what the section says layer by layer against the number of layers.

        Raises:
            ValueError: naming the key, its value and what would be right.
        """
        return

    def resized(self, num_layers: int, sizes: Mapping[str, int]) -> "Variant":
        """Return the same kind with other sizes, for a rehearsal."""
        return self.model_copy(update=dict(sizes))

    def foundation(self) -> "Variant | None":
        """Return the other kind whose weights a run may start from, or None.

        Parameters that it declares and the other does not start as they do in a new run.
        """
        return None

    @property
    def fingerprint(self) -> str | None:
        """Of the weights that the section was made for; those of its foundation must have it."""
        return None

    @property
    def assumption(self) -> str | None:
        """What a plan takes instead of a file that is not written yet, in a sentence."""
        return None

    @property
    @abstractmethod
    def heads(self) -> Heads:
        """How the heads lie in the projections."""

    @abstractmethod
    def baseline(self) -> "Variant":
        """Return the Transformer to compare with: as wide, and with as many keys and values."""

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return a layer's parameters beside the two projections; by default none."""
        return ()

    def own_products(self, hidden_size: int) -> float:
        """Return the multiply-adds per token of a layer's own matrices, averaged over layers."""
        own = self.parameters(hidden_size)
        return sum(math.prod(each.shape) for each in own if each.role == "matrix")

    @abstractmethod
    def products(self) -> int:
        """Return the multiply-adds of a layer's forward pass per (query, key) pair.

        They are the fewest that the equations need; a backward pass needs twice as many.
        """

    def work(self, backend: str, *, deterministic: bool = False) -> tuple[int, int]:
        """Return the multiply-adds that a backend does per pair of a query and a visible key.

        Args:
            backend: a name of the registry for :attr:`operation`.
            deterministic: whether the backend adds up gradients in a fixed order.

        Returns:
            Those of the forward and of the backward pass, which computes the scores again.
        """
        sizes = self.kernel_sizes(element=2, keys=0)._replace(is_deterministic=deterministic)
        return BACKENDS[self.operation][backend].work(sizes)

    def kernel_sizes(self, element: int, keys: float) -> Sizes:
        """Return the sizes that the costs of :attr:`operation` depend on, all heads together.

        Args:
            element: bytes of a number of q, k and v.
            keys: number of keys that a query is multiplied with.
        """
        heads = self.heads
        return Sizes(element, self.head_dim, heads.queries, 0, heads.keys, keys)

    @abstractmethod
    def kept_bytes(self, kernels: Kernels) -> tuple[float, float]:
        """Return the bytes per token that a layer keeps for the backward pass, all heads together.

        Returns:
            q, k, v and the input of the output projection; and what is kept from q, k and v on,
            which is computed again under selective recomputation.
        """

    def kv_cache_bytes(self, element: int) -> int:
        """Return the bytes per token and layer of the key-value cache."""
        return 2 * self.heads.key_channels * element

    def normalised(self, layer: Layer, query: "Tensor", key: "Tensor") -> "tuple[Tensor, Tensor]":
        """Return queries and keys [s, b, ..., d] normalised for rotation; by default as given."""
        return query, key

    def gate(self, layer: Layer, hidden: "Tensor") -> "Tensor | None":
        """Return what :meth:`forward` needs of the normalised input [s, b, hidden].

        Returns:
            [s, b, ...], or None if q, k and v are enough.
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
        """Compute the heads' outputs [b, s, ...], :attr:`Heads.output_channels` of them per token.

        Args:
            layer: its parameters.
            context: attention to the whole sequence.
            query: [b, s, queries, d] of this rank, rotated.
            key, value: [b, s, keys, d] of this rank, the keys rotated.
            gate: result of :meth:`gate`, [b, s, ...].
        """

    def current_lambda(self, layer: Layer) -> "Tensor | None":
        """Return lambda of a layer for the log, a 0-dim float32 tensor, or None.

        One that depends on the token is given to :meth:`Layer.observe` in passing.
        """
        return None

    @abstractmethod
    def hugging_face(self, hidden_size: int) -> HuggingFace:
        """Return the class of Hugging Face that computes the kind.

        Raises:
            UserError: there is none for these settings; naming the key and its value.
        """

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        """Return the kind of a configuration, the inverse of :meth:`hugging_face`.

        Raises:
            ValidationError: a value that the section cannot have.
        """
        # Not abstract: a kind without ``model_types`` is never read from a configuration.
        raise NotImplementedError

    def subtracted_maps(self, attention: Any, maps: "Tensor", hidden: "Tensor") -> "Tensor":
        """Return the maps that multiply the values in a layer of :meth:`hugging_face`'s class.

        Args:
            attention: the layer's module of attention.
            maps: float32 [queries, rows, keys], the softmax of every query head, in the order of
                ``q_proj``'s rows.
            hidden: what the attention reads at these rows, [rows, hidden_size].

        Returns:
            float32 [num_heads, rows, keys].
        """
        return maps

    @property
    def map_pairs(self) -> tuple[tuple[int, int], ...]:
        """The query heads, as :meth:`subtracted_maps` has them, of each head's two maps.

        Signal and noise; by default none, for a head has one map.
        """
        return ()

    @abstractmethod
    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[WeightRule]:
        """Return the rules that map the weights of a layer's attention to Hugging Face and back."""

    @property
    def inherited_export(self) -> str | None:
        """The kind whose ``hugging_face`` or ``weight_rules`` this one has taken over, if any."""
        rules = "layer_rules" if "layer_rules" in vars(type(self)) else "weight_rules"
        for name in (rules, "hugging_face"):
            owner = next(each for each in type(self).__mro__ if name in vars(each))
            if owner is not type(self):
                field = owner.model_fields["kind"] if issubclass(owner, Variant) else None
                return None if field is None else str(field.default)
        return None

    def check_export(self) -> None:
        """Refuse an export mapping that was written for the computation of a parent class.

        Raises:
            UserError: a class overrides the computation and inherits the mapping; with its name.
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

    def layer_rules(
        self, ours: str, theirs: str, hidden_size: int, *, layer: int, step: int
    ) -> list[WeightRule]:
        """Return :meth:`weight_rules` of one layer at one step; most kinds have one for all.

        Args:
            ours, theirs: the attention's name on either side.
            hidden_size: of the network.
            layer: its global number, from 1.
            step: optimizer steps that the weights have behind them.
        """
        return self.weight_rules(ours, theirs, hidden_size)

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield warnings about doubtful settings, one sentence each.

        Args:
            hidden_size: of the network.
            parameters: of the network without embeddings.
            lr: peak learning rate.
        """
        return iter(())

    def _width_in_words(self) -> str:
        return "" if self.output_width == 1 else f"{self.output_width} x "


def _fits(number: int) -> str:
    return clipped(str(divisors(number)))
