"""Rates of a GPU, measured by ``diffmegatron tune`` or assumed, for the estimate of a step's time.

A rate is a fraction of a data sheet's value, a bandwidth or a latency.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from diffmegatron.attention.costs import costs_of
from diffmegatron.attention.kernels.registry import known_backend
from diffmegatron.attention.kinds.kind import AttentionKind, kind_in_words
from diffmegatron.config.attention_backend import (
    PLANNED_LIBRARIES,
    attention_shape,
    chosen_kernels,
    planned_backend,
)
from diffmegatron.config.kernel_choice import Surroundings, choose_kernels
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, shorten
from diffmegatron.measurements.cache import cached_gpus, read_measurements
from diffmegatron.measurements.records import (
    CollectiveMeasurement,
    KernelMeasurement,
    KernelShape,
    Measurements,
)
from diffmegatron.model.accounting.hardware import (
    ACCELERATORS,
    GPUS_PER_NODE,
    Accelerator,
    find_accelerator,
)
from diffmegatron.model.accounting.parameters import counted_kinds

# Speed of products in FP8 relative to bf16: the ratio of their peaks in the data sheets.
FP8_SPEED = 2
# Bytes that one of k ranks sends per byte of a collective's whole tensor, with ring algorithms.
_SENT = {"all_reduce": lambda k: 2 * (k - 1) / k, "send": lambda _: 1.0}


class AttentionRates(NamedTuple):
    """Fractions of peak FLOP/s that attention kernels reach; ``is_measured`` if they are measured.

    A fraction may exceed 1 if a backend computes less than its stated multiply-adds.
    """

    forward: float
    backward: float
    is_measured: bool


@dataclass(frozen=True)
class Rates:
    """Efficiencies, bandwidths and latency, which data sheets do not contain.

    The defaults are assumptions; most first runs do not reach the optimistic ones.

    Attributes:
        matmul: fraction of peak FLOP/s that matrix products reach.
        attention: fraction of peak FLOP/s that attention kernels without a measurement reach.
        memory: fraction of memory bandwidth that element-wise operations and the optimizer reach.
        links: fraction of the links' bandwidth within a node that collectives reach.
        network: bandwidth between nodes in bytes/s per GPU and direction (400 Gb/s).
        network_share: fraction of ``network`` that collectives reach.
        latency: seconds that each collective takes in addition to the time of its bytes; `tune`
            times only large collectives.
        host: bandwidth of host memory in bytes/s per GPU.
        measurements: the measurements, which choose and time attention kernels; None without any.
        measured: names of the attributes above whose values are measured.
        source: the measured machine and the time in words; empty without measurements.
    """

    matmul: float = 0.6
    attention: float = 0.4
    memory: float = 0.8
    links: float = 0.7
    network: float = 50e9
    network_share: float = 0.7
    latency: float = 20e-6
    host: float = 25e9
    measurements: Measurements | None = None
    measured: frozenset[str] = frozenset()
    source: str = ""

    @classmethod
    def of(cls, measurements: Measurements, gpu: Accelerator) -> "Rates":
        """Return the rates of a measured GPU; those that were not measured are assumed."""
        values: dict[str, float] = {}
        products = [each for each in measurements.products if each.dtype == "bfloat16"]
        if products:
            flops = sum(each.flops_per_second * each.time.median for each in products)
            values["matmul"] = flops / sum(each.time.median for each in products) / gpu.peak_flops
        if measurements.memory is not None:
            values["memory"] = measurements.memory.bytes_per_second / gpu.memory_bandwidth
        within = _bandwidth(each for each in measurements.collectives if each.nodes == 1)
        if within is not None:
            values["links"] = within / gpu.link_bandwidth
        between = _bandwidth(each for each in measurements.collectives if each.nodes > 1)
        if between is not None:
            values |= {"network": between, "network_share": 1.0}
        machine, when = measurements.machine, [each.measured_at for each in measurements.kernels]
        return cls(
            **values,
            measurements=measurements,
            measured=frozenset(values),
            source=f"{machine.name}{f', {max(when)}' if when else ''}",
        )

    def of_attention(
        self, recipe: Recipe, kind: AttentionKind, backend: str, gpu: Accelerator
    ) -> AttentionRates:
        """Return the rates of a layer's kernels, from the most similar call of the backend."""
        for measured in self._similar(recipe, kind):
            for tried in measured.candidates:
                if tried.backend == backend and tried.forward and tried.backward:
                    work = _flops(kind, backend, measured.shape)
                    return AttentionRates(
                        work[0] / tried.forward.median / gpu.peak_flops,
                        work[1] / tried.backward.median / gpu.peak_flops,
                        is_measured=True,
                    )
        return AttentionRates(self.attention, self.attention, is_measured=False)

    def _similar(self, recipe: Recipe, kind: AttentionKind) -> list[KernelMeasurement]:
        """Return the measured calls that are similar to a layer's call, the most similar first.

        They have the same operation, dtype, head_dim, features, and ratio of signal to noise heads.
        They are sorted by their numbers of (query, key) pairs.
        """
        if self.measurements is None:
            return []
        wanted = attention_shape(recipe, kind)
        similar = [each for each in self.measurements.kernels if _is_similar(each.shape, wanted)]
        pairs = wanted.visible_pairs
        return sorted(similar, key=lambda each: abs(math.log(each.shape.visible_pairs / pairs)))


@dataclass(frozen=True)
class Hardware:
    """A GPU to estimate for: its name in ``ACCELERATORS``, its data sheet, and its rates."""

    name: str
    rates: Rates = Rates()

    @property
    def gpu(self) -> Accelerator:
        """Values of the data sheet."""
        return ACCELERATORS[self.name]

    def with_backend(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the kernels that ``auto`` chooses in a new run on this GPU.

        Without measurements, and with kernels that the recipe has recorded on a GPU, it stays as
        it is.

        Raises:
            UserError: no backend can run, or none is right.
        """
        recorded, measured = recipe.training.chosen_kernels, self.rates.measurements
        if recipe.training.attention_backend != "auto" or measured is None:
            return recipe
        if recorded is not None and recorded.device == "cuda":
            return recipe
        here = Surroundings("cuda", PLANNED_LIBRARIES, measured, chip=measured.machine.chip)
        chosen = {"chosen_kernels": choose_kernels(recipe, here).kernels}
        training = recipe.training.model_copy(update=chosen)
        return recipe.model_copy(update={"training": training})


def find_hardware(hardware: str) -> Hardware:
    """Return the GPU of a name in ``ACCELERATORS``, or of a file of measurements.

    A name has the measured rates of this user's cache, if it has measurements of such a GPU.

    Raises:
        UserError: the name is unknown, or the file cannot be read or is not of a known GPU.
    """
    if hardware in ACCELERATORS:
        name, found = (
            hardware,
            [each for each in cached_gpus() if known_gpu(each.machine.name) == hardware],
        )
    elif hardware.endswith(".json"):
        path = Path(hardware)
        found = [read_measurements(path)]
        if (known := known_gpu(found[0].machine.name)) is None:
            raise UserError(
                f"{format_path(path)} has measurements of {shorten(found[0].machine.name)}, which "
                f"plan does not know; measure one of {', '.join(ACCELERATORS)}"
            )
        name = known
    else:
        raise UserError(
            f"hardware {shorten(hardware)!r} is unknown; give one of {', '.join(ACCELERATORS)}, or "
            "a file that 'diffmegatron tune --out FILE.json' wrote"
        )
    return Hardware(name, Rates.of(found[-1], ACCELERATORS[name])) if found else Hardware(name)


def origin(used: Iterable[str], measured: Collection[str]) -> str:
    """Return "measured", "assumed" or "measured in part" for an estimate, or "none" without rates.

    ``used`` are the names of the rates that the estimate uses.
    """
    found = [name in measured for name in used]
    if not found:
        return "none"
    if all(found):
        return "measured"
    return "measured in part" if any(found) else "assumed"


def sentences(recipe: Recipe, hardware: Hardware) -> tuple[str, ...]:
    """Return a sentence for each rate, which ends with its origin, and for what is left out."""
    rates, gpu = hardware.rates, hardware.gpu

    def line(text: str, *names: str, note: str = "") -> str:
        found = origin(names, rates.measured)
        return f"{text} ({found}{note if found == 'assumed' else ''})"

    return (
        *([f"rates: measured on {rates.source}"] if rates.source else []),
        f"FLOP/s: bf16, {gpu.peak_flops / 1e12:,.0f} TFLOP/s dense peak of {hardware.name}",
        line(f"matrix products: {rates.matmul:.0%} of that peak", "matmul", note=", optimistic"),
        *_fp8_in_words(recipe),
        *(_attention_in_words(recipe, kind, hardware) for kind, _ in counted_kinds(recipe.model)),
        "MFU: model FLOPs over that peak; recomputation takes time but does not count",
        line(f"memory: {rates.memory:.0%} of its bandwidth", "memory"),
        line(f"host: {rates.host / 1e9:g} GB/s to the memory of the host", "host"),
        line(
            f"links: collectives reach {rates.links:.0%} within nodes of {GPUS_PER_NODE}",
            "links",
            note=", optimistic",
        ),
        line(
            f"network: {rates.network_share:.0%} of {rates.network / 1e9:.3g} GB/s per GPU between "
            "nodes",
            "network",
            note=", optimistic",
        ),
        line(
            f"latency: {1e6 * rates.latency:.3g} µs for each collective or message of a pipeline",
            "latency",
        ),
        "overlap: ring attention's communication with attention, and without pipeline the sum of "
        "ZeRO 1's gradients with the last microbatch's backward pass (assumed)",
        "data loading, checkpoints and stragglers take no time (assumed, optimistic)",
    )


def _fp8_in_words(recipe: Recipe) -> list[str]:
    if recipe.training.fp8 is None:
        return []
    return [
        f"FP8: products of layers are {FP8_SPEED} times as fast as in bf16, and their operands are "
        "quantized at the memory's rate (assumed, optimistic); its memory is an estimate too"
    ]


def _attention_in_words(recipe: Recipe, kind: AttentionKind, hardware: Hardware) -> str:
    name = planned_backend(recipe, kind)
    channels = kind.num_heads * kind.head_dim
    work = costs_of(kind).work(name, deterministic=recipe.training.deterministic)
    forward, backward = (f"{each / channels:.3g}d" for each in work)
    rates = hardware.rates.of_attention(recipe, kind, name, hardware.gpu)
    reason = ""
    if (chosen := chosen_kernels(recipe, kind, "cuda")) is not None:
        reason = f" ({chosen.origin})"
    elif recipe.training.attention_backend == "auto":
        reason = ", which auto chooses without FlashAttention's libraries"
    hidden = known_backend(kind.operation, name).computes_hidden_pairs
    pairs = "pair, hidden ones too," if hidden else "visible pair"
    reached = f"{rates.forward:.0%} of the peak (assumed, optimistic)"
    if rates.is_measured:
        reached = f"{rates.forward:.0%} and {rates.backward:.0%} of the peak (measured)"
    return (
        f"attention {kind_in_words(kind)}: backend {name}{reason}; multiply-adds per {pairs} and "
        f"head: {forward} forward, {backward} backward; {reached}"
    )


def known_gpu(device_name: str) -> str | None:
    """Return the name in ``ACCELERATORS`` of a GPU that CUDA names; None for another device."""
    gpu = find_accelerator(device_name)
    return next((name for name, each in ACCELERATORS.items() if each is gpu), None)


def _bandwidth(collectives: Iterable[CollectiveMeasurement]) -> float | None:
    """Return the bytes/s that a rank sends in the largest collective; None without collectives."""
    largest = max(collectives, key=lambda each: each.bytes, default=None)
    if largest is None:
        return None
    sent = _SENT.get(largest.operation, lambda k: (k - 1) / k)
    return float(sent(largest.ranks) * largest.bytes / largest.time.median)


def _is_similar(one: KernelShape, other: KernelShape) -> bool:
    names = ("operation", "dtype", "head_dim", "features")
    same = all(getattr(one, name) == getattr(other, name) for name in names)
    return same and (one.signal_heads * other.noise_heads == other.signal_heads * one.noise_heads)


def _flops(kind: AttentionKind, backend: str, shape: KernelShape) -> tuple[float, float]:
    """Return the FLOPs of a measured call of a backend: forward and backward."""
    work = costs_of(kind).work(backend, deterministic=shape.is_deterministic)
    share = shape.signal_heads / costs_of(kind).kernel_sizes(element=0, keys=0).signal_heads
    if known_backend(kind.operation, backend).computes_hidden_pairs:
        share *= 2
        shape = shape.model_copy(update={"window": None})
    forward, backward = (2 * each * share * shape.visible_pairs for each in work)
    return forward, backward
