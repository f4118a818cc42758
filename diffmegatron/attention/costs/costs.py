"""Estimated costs of a layer, from its heads, its parameters and its operation."""

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from diffmegatron.attention.costs.layer_run import LayerRun
from diffmegatron.attention.kernels.costs import FLOAT32, Sizes, ring_saved
from diffmegatron.attention.kernels.registry import known_backend
from diffmegatron.attention.kinds.kind import AttentionKind, window_in
from diffmegatron.attention.kinds.layer import HEAD_NORM, OUTPUT_GATE, QK_NORMS

Kind = TypeVar("Kind", bound=AttentionKind)


class Costs(Generic[Kind]):
    """Costs of a layer of one kind of attention.

    The methods of this class assume that ``forward`` calls the kind's operation once, with the
    heads of ``heads``. If the output has other channels than the queries, ``forward`` is assumed to
    subtract heads as DIFF V2 does, with a float32 lambda per token and head.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def products(self) -> int:
        """Return the minimum multiply-adds per (query, key) pair of a layer's forward pass.

        A score costs d multiply-adds in each query head. The weighted sum of the values costs d in
        each query head, or with two maps 2d in each signal head, whose maps are subtracted first.
        """
        heads, has_two_maps = self.kind.heads, self.kind.operation == "differential"
        sums = heads.output_channels if has_two_maps else heads.query_channels
        return heads.query_channels + sums

    def visible_keys(self, length: int) -> float:
        """Return the mean number of keys that a token of a sequence sees.

        ``length`` is the number of tokens of the sequence. Each of the first tokens, which see all
        before them, counts half a key too few, as in the usual half of the length.
        """
        window = window_in(self.kind, length)
        return length / 2 if window is None else window - window**2 / (2 * length)

    def own_products(self, hidden_size: int) -> float:
        """Return the multiply-adds per token of the matrices that the kind declares."""
        own = self.kind.parameters(hidden_size)
        return sum(math.prod(each.shape) for each in own if each.role == "matrix")

    def work(self, backend: str, *, deterministic: bool = False) -> tuple[int, int]:
        """Return a backend's multiply-adds per (query, visible key) pair: forward and backward.

        ``deterministic`` makes the backward pass sum in a fixed order, which can cost more.
        """
        sizes = self.kernel_sizes(element=2, keys=0)._replace(is_deterministic=deterministic)
        return known_backend(self.kind.operation, backend).work(sizes)

    def kernel_sizes(self, element: int, keys: float) -> Sizes:
        """Return the sizes of the operation; ``element`` and ``keys`` are those of `LayerRun`."""
        heads, d = self.kind.heads, self.kind.head_dim
        if self.kind.operation == "softmax":
            return Sizes(element, d, heads.queries, 0, heads.keys, keys)
        signal = heads.output_channels // (2 * d)
        return Sizes(element, d, signal, heads.queries - signal, heads.keys // 2, keys)

    def saved_bytes(self, run: LayerRun) -> tuple[float, float]:
        """Return the bytes per token that all heads of a layer save for the backward pass.

        The first number counts q, k, v and the input of the output projection. The second number
        counts the tensors in between, which selective recomputation computes again.
        """
        has_two_maps = self.kind.operation == "differential"
        inputs, core = self._two_maps_bytes(run) if has_two_maps else self._softmax_bytes(run)
        if self._declares(QK_NORMS[0]):
            inputs += self._norm_bytes(run)
        if gate := self._gate_logits():
            # The gate saves the sigmoid and the heads' outputs. The output projection saves the
            # product. Recomputation needs the logits.
            core += run.element * (gate + self.kind.heads.output_channels)
            inputs += run.element * gate if run.recomputes_core else 0
        return inputs + run.element * self.kind.heads.output_channels, core

    def kv_cache_bytes(self, element: int) -> int:
        """Return the bytes per token of a layer's key-value cache; ``element`` as in `LayerRun`."""
        return 2 * self.kind.heads.key_channels * element

    def served_cache_bytes(self, element: int) -> int:
        """Return the bytes per token of a layer's key-value cache in a serving engine.

        An engine caches the heads of one attention call with keys as wide as values. With two maps
        these are each key with each half of its value.
        """
        repeats = 2 if self.kind.operation == "differential" else 1
        return repeats * self.kv_cache_bytes(element)

    def _gate_logits(self) -> int:
        """Return the number of logits per token of the output gate; 0 without a gate."""
        is_headwise = self._declares(OUTPUT_GATE)
        return self.kind.num_heads if is_headwise else self.kind.heads.channels("g")

    def _copies_halves(self) -> bool:
        """Return whether the layer copies the heads of both maps together, from unequal halves."""
        return [kind for kind, _ in self.kind.heads.group].count("q") > 1

    def _declares(self, name: str) -> bool:
        return any(each.name == name for each in self.kind.parameters(1))

    def _norm_bytes(self, run: LayerRun) -> float:
        """Return the bytes that the norms of queries and keys save.

        They save a float32 per head and their input. On a CPU they also save their normalised input
        in float32, and in bf16 runs they save the input in float32.
        """
        heads = self.kind.heads
        channels = heads.query_channels + heads.key_channels
        saved = FLOAT32 * (heads.queries + heads.keys)
        if run.device == "cpu":
            saved += FLOAT32 * channels
            if run.element < FLOAT32:
                return saved + FLOAT32 * channels
        if self._copies_halves():
            # The input is the copy.
            return saved + run.element * channels
        # The input is a view that keeps all of linear_qkv's output in memory. This output is
        # counted already if attention saves another view of it.
        is_softmax = self.kind.operation == "softmax"
        is_counted = run.communication is None if is_softmax else run.recomputes_core
        return saved + (0 if is_counted else run.element * heads.qkv_channels)

    def _softmax_bytes(self, run: LayerRun) -> tuple[float, float]:
        heads = self.kind.heads
        inputs, core = run.softmax_bytes(heads)
        if heads.output_channels != heads.query_channels:
            # The subtraction saves the logits of lambda, and the outputs of all query heads. The
            # output projection saves the difference.
            signal = heads.output_channels // heads.head_dim
            core += run.element * (heads.query_channels + signal)
            # Recomputation does not compute the logits again.
            inputs += run.element * signal if run.recomputes_core else 0
        if self._declares(HEAD_NORM):
            # The output projection saves the norm's output, so the kernel's output is an additional
            # tensor. The norm saves a float32 per head, and its input in float32 if the kernel's
            # output is narrower. On a CPU it also saves its normalised input.
            is_narrow, is_unfused = run.element < FLOAT32, run.device == "cpu"
            core += run.element * heads.query_channels + FLOAT32 * heads.queries
            core += FLOAT32 * heads.query_channels * (is_narrow + is_unfused)
        return inputs, core

    def _two_maps_bytes(self, run: LayerRun) -> tuple[float, float]:
        heads, sizes = self.kind.heads, self.kernel_sizes(run.element, run.keys)
        outputs, backend = heads.output_channels, known_backend("differential", run.backend)
        if run.communication == "ring":
            core, saves_result, fuses_norm = float(ring_saved(sizes)), True, False
        else:
            core, saves_result = backend.saved(sizes), backend.saves_result
            fuses_norm = backend.fuses_norm
        if saves_result:
            core += run.element * outputs
        if self._declares(HEAD_NORM) and not fuses_norm:
            # The norm saves its float32 input and one float32 per head. On a CPU it also saves its
            # normalised input.
            copies = 2 if run.device == "cpu" else 1
            core += FLOAT32 * (outputs * copies + sizes.signal_heads)
        inputs = run.element * heads.query_channels
        if run.recomputes_core:
            # Recomputation saves q, k and v of this rank. v is a view that keeps all of
            # linear_qkv's output in memory, or a copy of both halves.
            kept = heads.key_channels if self._copies_halves() else heads.qkv_channels
            return inputs + run.element * (heads.key_channels + kept), core
        return inputs + self._key_value_bytes(run, sizes), core

    def _key_value_bytes(self, run: LayerRun, sizes: Sizes) -> float:
        """Return the bytes of the keys and values that differential attention saves."""
        heads, backend = self.kind.heads, known_backend("differential", run.backend)
        keys = run.element * heads.key_channels
        if run.communication == "ring" or backend.saves_values:
            return 2 * keys * run.key_shards
        if run.has_mask and backend.saves_bias and sizes.signal_heads > sizes.kv_heads:
            # This backend calls torch's attention twice per map, each time with one half of the
            # value. Each call copies a key and half a value, both of width d, for every query head.
            return 4 * run.element * heads.query_channels * run.keys_per_query
        # Keys are saved once per key shard. Each call copies its values: in total `keys_per_query`
        # values per token of this rank. `Backend.saved` already counts one of these values.
        saved = keys * (run.key_shards + run.keys_per_query - 1)
        # With context parallelism, the saved keys are views of a received tensor that also has the
        # values, and keep this tensor in memory.
        return saved if run.communication is None else saved + keys * run.key_shards


COSTS: dict[type[AttentionKind], type[Costs[Any]]] = {}
OwnCosts = TypeVar("OwnCosts", bound=type[Costs[Any]])


def register_costs(kind: type[AttentionKind]) -> Callable[[OwnCosts], OwnCosts]:
    """Return a decorator that registers the costs of exactly this class of attention."""

    def register(costs: OwnCosts) -> OwnCosts:
        COSTS[kind] = costs
        return costs

    return register


def costs_of(kind: AttentionKind) -> Costs[Any]:
    """Return the registered costs of a kind, or the default of `Costs`."""
    return COSTS.get(type(kind), Costs)(kind)
