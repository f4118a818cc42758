"""The computation of a training step, from measured kernels, products and memory."""

from typing import NamedTuple

from diffmegatron.config.attention_backend import attention_shape, run_dtype, subtraction_shape
from diffmegatron.config.schema import Recipe
from diffmegatron.measurements.records import KernelShape, Measurements, ProductMeasurement
from diffmegatron.model.accounting.flops import count_flops, frozen_matrices
from diffmegatron.model.accounting.hardware import Accelerator
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.plan.rates import Rates
from diffmegatron.plan.timing import elementwise_bytes, optimizer_seconds
from diffmegatron.plan.traffic import attention_passes
from diffmegatron.tuning.rates import products_of


class MeasuredStep(NamedTuple):
    """Seconds of a step's computation on one rank of the pipeline stage with the output layer.

    Communication, the pipeline's bubble, data loading and saves are not in it.

    Attributes:
        products: matrix products.
        attention: attention, and the subtraction of noise heads.
        elementwise: other operations, whose bytes are estimated and whose rate is measured.
        optimizer: update of the weights; its bytes are estimated too.
        flops: model FLOPs of the step on this rank.
    """

    products: float
    attention: float
    elementwise: float
    optimizer: float
    flops: float

    @property
    def total(self) -> float:
        """Seconds of all parts."""
        return self.products + self.attention + self.elementwise + self.optimizer


def measured_step(recipe: Recipe, ranks: int, found: Measurements) -> MeasuredStep | None:
    """Return the time of a step's computation, or None if a part of it was not measured.

    Products in FP8 are not measured.
    """
    if recipe.training.fp8 is not None:
        return None
    microbatches = recipe.num_microbatches(ranks)
    products, attention = _products(recipe, found), _attention(recipe, found)
    if products is None or attention is None or found.memory is None:
        return None
    rate = found.memory.bytes_per_second
    fastest = max(each.flops_per_second for each in products_in(run_dtype(recipe), found))
    rates = Accelerator(
        fastest, memory_gib=0.0, memory_bandwidth=rate, link_bandwidth=0.0, capability=(0, 0)
    )
    training = recipe.training
    flops = count_flops(recipe.model, training.seq_length, frozen_matrices(recipe)).training
    return MeasuredStep(
        products=microbatches * products,
        attention=microbatches * attention,
        elementwise=microbatches * elementwise_bytes(recipe) / rate,
        optimizer=optimizer_seconds(recipe, ranks, rates, Rates(matmul=1.0, memory=1.0)),
        flops=flops * training.tokens_per_step / ranks,
    )


def products_in(dtype: str, found: Measurements) -> list[ProductMeasurement]:
    """Return the measured products of a dtype."""
    return [each for each in found.products if each.dtype == dtype]


def _products(recipe: Recipe, found: Measurements) -> float | None:
    """Return the seconds of all products of a microbatch on one rank."""
    times = {
        (each.rows, each.inner, each.columns): each.time.median
        for each in products_in(run_dtype(recipe), found)
    }
    total = 0.0
    for each in products_of(recipe):
        seconds = times.get((each.rows, each.inner, each.columns))
        if seconds is None:
            return None
        total += each.uses * seconds
    return total


def _attention(recipe: Recipe, found: Measurements) -> float | None:
    """Return the seconds of attention and subtraction per microbatch, by the fastest backends."""
    total, passes = 0.0, attention_passes(recipe)
    for kind, count in counted_kinds(recipe.model):
        layers = count / recipe.parallel.pipeline
        for shape in (attention_shape(recipe, kind), subtraction_shape(recipe, kind)):
            if shape is None:
                continue
            measured = found.of_shape(shape)
            fastest = None if measured is None else measured.fastest
            if fastest is None or fastest.forward is None or fastest.backward is None:
                return None
            calls = _calls(recipe, shape)
            seconds = passes * fastest.forward.median + fastest.backward.median
            total += layers * calls * seconds
    return total


def _calls(recipe: Recipe, shape: KernelShape) -> float:
    """Return how many times the work of a trial a layer does per microbatch on one rank.

    With 2 P chunks of a sequence on P ranks, a rank's two chunks see 2 P + 1 chunks of keys. The
    trial of a ring sees three, and that of gathered keys 2 P. With a window, their visible pairs
    are compared.
    """
    chunks = 2 * recipe.parallel.context
    rows = recipe.training.micro_batch_size / shape.batch if "offsets" in shape.features else 1.0
    is_shared = "chunks" in shape.features or shape.keys > shape.length
    if is_shared and shape.window is not None:
        tokens = {"length": recipe.training.seq_length, "keys": recipe.training.seq_length}
        sequences = shape.model_copy(update=tokens | {"features": ()})
        of_rank = sequences.visible_pairs / recipe.parallel.context
        return rows * of_rank / shape.visible_pairs
    if "chunks" in shape.features:
        return rows * (chunks + 1) / 3
    return rows * (chunks + 1) / chunks if shape.keys > shape.length else rows
