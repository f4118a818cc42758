"""The format of measurements: kernels by shape, matrix products, memory and collectives.

This module does not import torch, so that commands which plan a recipe start fast.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from diffmegatron.attention.kernels.registry import Op
from diffmegatron.measurements.machine import Machine
from diffmegatron.section import Count, Section, Size, SizeOrZero

Seconds = Annotated[float, Field(gt=0)]
"""Time of a kernel or a collective, in seconds."""

CollectiveOperation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


class KernelShape(Section):
    """Properties of a call that determine which implementations are right, and how fast they are.

    Attributes:
        operation: operation of the call; "loss" is the cross-entropy of a chunk of tokens.
        dtype: torch's name of the inputs' dtype, such as "bfloat16".
        batch: sequences of a call.
        length: queries of a call, per sequence.
        keys: keys of a call, per sequence, at least as many as queries; 0 of a subtraction or loss.
        head_dim: width of a query; of a loss, ids in a rank's shard of the vocabulary.
        signal_heads: query heads of the first map on this rank, or signal heads of a subtraction.
        noise_heads: query heads of the second map, or noise heads; 0 with one map.
        kv_heads: key-value heads on this rank.
        features: sorted keys of ``registry.FEATURES`` that the layout needs.
        window: number of keys that a query sees, of the feature "windows"; None without it.
        has_norm: whether the call has a headwise norm.
        is_deterministic: whether gradients must be summed in a fixed order.
    """

    operation: Op | Literal["loss"]
    dtype: str
    batch: Size
    length: Count
    keys: SizeOrZero = 0
    head_dim: Size
    signal_heads: SizeOrZero = 0
    noise_heads: SizeOrZero = 0
    kv_heads: SizeOrZero = 0
    features: tuple[str, ...] = ()
    window: Size | None = None
    has_norm: bool = False
    is_deterministic: bool = False

    @property
    def visible_pairs(self) -> float:
        """Number of (query, key) pairs of a call with a causal mask.

        The last query sees all keys except those that a window hides.
        """
        length, keys = self.length, self.keys
        if "chunks" in self.features:  # A measured ring has one rank, with two chunks.
            length, keys = 2 * length, 2 * keys
        window = self.window or keys

        def of_first(queries: int) -> float:
            most = min(queries, window)
            return most * (queries - (most - 1) / 2)

        return self.batch * (of_first(keys) - of_first(keys - length))

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        if self.operation not in ("subtraction", "loss") and self.keys < self.length:
            raise ValueError(f"keys {self.keys} is below length {self.length}")
        return self


class Timing(Section):
    """Median of several measurements in seconds, and the range of their middle half."""

    median: Seconds
    spread: Annotated[float, Field(ge=0)]


class TriedBackend(Section):
    """One implementation of an operation, with its error and its time for a shape.

    Attributes:
        backend: name of the backend, as ``training.attention_backend`` has it.
        error: worst error divided by the allowed error, over all checks; at most 1 if the results
            are right. None: the implementation did not return results.
        problem: reason why the results are wrong or missing; empty: they are right.
        forward, backward: times of the passes; None without right results.
        lost_device: whether the backend made the GPU unusable for the process, for example by a
            wrong address.
    """

    backend: str
    error: Annotated[float | None, Field(ge=0)] = None
    problem: str = ""
    forward: Timing | None = None
    backward: Timing | None = None
    lost_device: bool = False

    @property
    def seconds(self) -> float | None:
        """Median time of a forward and a backward pass; None without right results."""
        if self.problem or self.forward is None or self.backward is None:
            return None
        return self.forward.median + self.backward.median


class KernelMeasurement(Section):
    """Errors and times of all implementations of an operation that can run, for one shape.

    ``measured_at`` is the time in UTC, such as "2026-11-28T17:05:00Z".
    """

    shape: KernelShape
    candidates: tuple[TriedBackend, ...]
    measured_at: str

    @property
    def lost(self) -> dict[str, TriedBackend]:
        """Candidates that made the GPU unusable, by name."""
        return {each.backend: each for each in self.candidates if each.lost_device}

    @property
    def fastest(self) -> TriedBackend | None:
        """The right candidate with the shortest time; None if no candidate is right."""
        timed = [each for each in self.candidates if each.seconds is not None]
        return min(timed, key=lambda each: each.seconds or 0.0, default=None)


class ProductMeasurement(Section):
    """Time of a matrix product [rows, inner] x [inner, columns].

    ``name`` is a use of the product, such as "linear_qkv".
    """

    name: str
    dtype: str
    rows: Size
    inner: Size
    columns: Size
    time: Timing

    @property
    def flops_per_second(self) -> float:
        """Floating-point operations per second; a multiply-add counts as two."""
        return 2.0 * self.rows * self.inner * self.columns / self.time.median


class MemoryMeasurement(Section):
    """Time of a copy within the device's memory; ``bytes`` counts reads and writes."""

    bytes: Count
    time: Timing

    @property
    def bytes_per_second(self) -> float:
        """Bytes read and written per second."""
        return self.bytes / self.time.median


class CollectiveMeasurement(Section):
    """Time of a collective over ``ranks`` ranks on ``nodes`` machines.

    ``bytes`` is the size of the whole tensor: that which all_reduce sums, the output of all_gather,
    and the input of reduce_scatter and all_to_all. ``name`` is the dimension of the layout that
    uses the collective, such as "tensor" or "gradients".
    """

    name: str
    operation: CollectiveOperation
    ranks: Size
    nodes: Size
    bytes: Count
    time: Timing


class Measurements(Section):
    """All measurements of one machine."""

    machine: Machine
    kernels: tuple[KernelMeasurement, ...] = ()
    products: tuple[ProductMeasurement, ...] = ()
    memory: MemoryMeasurement | None = None
    collectives: tuple[CollectiveMeasurement, ...] = ()

    def of_shape(self, shape: KernelShape) -> KernelMeasurement | None:
        """Return the measurement of exactly this shape, or None."""
        return next((each for each in self.kernels if each.shape == shape), None)

    def updated(self, newer: "Measurements") -> "Measurements":
        """Return these measurements, with those of ``newer`` added or in place of older ones."""
        kernels = {each.shape: each for each in (*self.kernels, *newer.kernels)}
        products = {
            (each.dtype, each.rows, each.inner, each.columns): each
            for each in (*self.products, *newer.products)
        }
        collectives = {
            (each.operation, each.ranks, each.nodes, each.bytes): each
            for each in (*self.collectives, *newer.collectives)
        }
        return Measurements(
            machine=newer.machine,
            kernels=tuple(kernels.values()),
            products=tuple(products.values()),
            memory=newer.memory or self.memory,
            collectives=tuple(collectives.values()),
        )
