"""Tables of measurements, as ``diffmegatron tune`` prints them."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.config.attention_backend import run_dtype
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, shorten
from diffmegatron.measurements.records import KernelMeasurement, Measurements, TriedBackend
from diffmegatron.plan.rates import Hardware, known_gpu
from diffmegatron.plan.timing import estimate_time
from diffmegatron.tuning.step import MeasuredStep, measured_step, products_in
from diffmegatron.tuning.tune import Tuned, describe_shape, kernel_shapes


def print_tuned(tuned: Tuned, recipes: Sequence[Recipe], ranks: int) -> None:
    """Print the measurements of recipes on ``ranks`` ranks, and where they are stored."""
    console, found = Console(highlight=False), tuned.measurements
    for shape in dict.fromkeys(shape for recipe in recipes for shape in kernel_shapes(recipe)):
        measured = found.of_shape(shape)
        if measured is not None:
            console.print(_kernel_table(measured))
    console.print(_rates(found))
    for recipe in recipes:
        for line in _step_lines(recipe, ranks, found):
            console.print(Text(line), soft_wrap=True)
    if tuned.path is not None:
        console.print(Text(f"wrote {format_path(tuned.path)}"), soft_wrap=True)


COLUMNS = ("backend", "result", "error / allowed", "forward ms", "backward ms", "time / chosen")


def kernel_rows(measured: KernelMeasurement) -> list[tuple[str, ...]]:
    """Return a row of :data:`COLUMNS` for each backend; times are medians and half the spread."""
    return [_row(each, measured.fastest) for each in measured.candidates]


def _row(each: TriedBackend, fastest: TriedBackend | None) -> tuple[str, ...]:
    error = "" if each.error is None else f"{each.error:.2f}"
    if each.seconds is None or each.forward is None or each.backward is None:
        return each.backend, each.problem, error, "", "", ""
    assert fastest is not None and fastest.seconds is not None
    times = (
        f"{1e3 * time.median:.3g} ± {500 * time.spread:.2g}"
        for time in (each.forward, each.backward)
    )
    return each.backend, "right", error, *times, f"{each.seconds / fastest.seconds:.2f}"


def _kernel_table(measured: KernelMeasurement) -> Table:
    table = Table(title=describe_shape(measured.shape), title_justify="left")
    for heading in COLUMNS:
        table.add_column(heading)
    for row in kernel_rows(measured):
        table.add_row(*map(Text, row))
    return table


def _rates(found: Measurements) -> Table:
    """Return a table of all products, of memory and of collectives."""
    table = Table(title="Rates", title_justify="left")
    for heading in ("measured", "size", "rate"):
        table.add_column(heading)
    for each in found.products:
        size = f"{each.rows} x {each.inner} x {each.columns} {each.dtype}"
        table.add_row(each.name, size, f"{each.flops_per_second / 1e12:.4g} TFLOP/s")
    if found.memory is not None:
        size = f"{found.memory.bytes / 2**20:.0f} MiB"
        table.add_row("memory", size, f"{found.memory.bytes_per_second / 1e9:.4g} GB/s")
    for collective in found.collectives:
        rate = collective.bytes / collective.time.median / 1e9
        size = f"{collective.bytes / 2**20:.2f} MiB, {collective.ranks} ranks"
        table.add_row(f"{collective.operation} ({collective.name})", size, f"{rate:.4g} GB/s")
    return table


def _step_lines(recipe: Recipe, ranks: int, found: Measurements) -> list[str]:
    """Return what the computation of a step takes: measured, and as ``plan`` assumes it."""
    name = shorten(recipe.run_dir)
    needed = ranks if ranks > 1 else recipe.parallel.model_ranks
    try:
        step = measured_step(recipe, needed, found)
    except UserError as error:  # The layout does not fit the ranks.
        return [f"{name}: {error}"]
    if step is None:
        is_fp8 = recipe.training.fp8 is not None
        reason = "products in FP8 are not measured" if is_fp8 else "no backend is right for a shape"
        return [f"{name}: no step is estimated, because {reason}"]
    parts = ", ".join(
        f"{part} {1e3 * getattr(step, part):.3g}"
        for part in ("products", "attention", "elementwise", "optimizer")
    )
    lines = [
        f"{name}: the computation of a step on one of {needed} ranks takes "
        f"{1e3 * step.total:.4g} ms by these measurements ({parts} ms)"
    ]
    return [*lines, *_comparison(recipe, needed, found, step)]


def _comparison(recipe: Recipe, ranks: int, found: Measurements, step: MeasuredStep) -> list[str]:
    name = known_gpu(found.machine.name)
    rate = step.flops / step.total
    if name is None:
        products = products_in(run_dtype(recipe), found)
        best = max(each.flops_per_second for each in products)
        return [f"  {rate / 1e12:.4g} TFLOP/s, {rate / best:.0%} of the fastest matrix product"]
    hardware = Hardware(name)
    assumed = estimate_time(recipe, ranks, hardware)
    seconds = assumed.compute + assumed.optimizer
    return [
        f"  model FLOPs utilization without communication: {rate / hardware.gpu.peak_flops:.1%}",
        f"  assumed by plan: {1e3 * seconds:.4g} ms, {step.total / seconds:.2f} times as fast",
    ]
