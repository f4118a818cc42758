"""Verify and time the kernels of recipes on this machine, and store the measurements."""

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from diffmegatron.attention.kernels.configuration import Configuration
from diffmegatron.attention.kernels.registry import base_name
from diffmegatron.config.attention_backend import attention_shape, loss_shape, subtraction_shape
from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.errors import UserError
from diffmegatron.file_lock import FileLock
from diffmegatron.files import format_path
from diffmegatron.measurements.cache import (
    cache_file,
    cached_measurements,
    check_writable,
    measurements_of,
    write_measurements,
)
from diffmegatron.measurements.machine import this_machine
from diffmegatron.measurements.records import (
    CollectiveMeasurement,
    KernelMeasurement,
    KernelShape,
    Measurements,
    TriedBackend,
)
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.parallel.default_group import default_group, own_device
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.training.monitoring.progress import print_line
from diffmegatron.tuning.rates import measure_collectives, measure_memory, measure_products
from diffmegatron.tuning.timing import passes, time_in_turn
from diffmegatron.tuning.trials import usable_backends
from diffmegatron.tuning.verification import Check, checks_of, verify

log = logging.getLogger(__name__)

# Seconds of repeated calls: of each shape, of all matrix products, and of the copy in memory.
_KERNEL_SECONDS, _PRODUCT_SECONDS, _COPY_SECONDS = 2.0, 3.0, 0.5
# Seconds from the start in which other configurations of a backend are tried. Each is compiled.
_CONFIGURATION_SECONDS = 45.0


class Tuned(NamedTuple):
    """Measurements of recipes, and their file; None if the user's cache cannot be written."""

    measurements: Measurements
    path: Path | None


def tune(recipes: Sequence[Recipe], out: Path | None = None) -> Tuned | None:
    """Measure the kernels of recipes, and add the measurements to this machine's file.

    Rank 0 verifies and times kernels, products and memory. All ranks time the collectives of the
    recipes whose layout fits them. Every rank must call this function.

    Args:
        out: file to write in place of the one in the user's cache. Measurements of this machine
            that it has are kept.

    Returns:
        The measurements on rank 0, and None on the other ranks.

    Raises:
        UserError: ``out`` cannot be written, or a kernel has made the GPU unusable for this
            process. If the user's cache cannot be written, a warning says so instead.
    """
    launch = read_launch()
    with default_group():
        collectives = _measure_between_ranks(recipes) if launch.ranks > 1 else []
        found = None
        # Megatron-core's loss needs a tensor-parallel group, here of one rank.
        with process_groups(ParallelConfig(), seed=0):
            if launch.rank == 0:
                found = _measure_on_one_rank(recipes, collectives, out)
            distributed.barrier()
    return found


def kernel_shapes(recipe: Recipe) -> list[KernelShape]:
    """Return the different shapes of a recipe's attention, subtraction and loss on one rank."""
    kinds = [kind for kind, _ in counted_kinds(recipe.model)]
    shapes = [each(recipe, kind) for kind in kinds for each in (attention_shape, subtraction_shape)]
    shapes.append(loss_shape(recipe))
    return list(dict.fromkeys(shape for shape in shapes if shape is not None))


def _measure_on_one_rank(
    recipes: Sequence[Recipe], collectives: Sequence[CollectiveMeasurement], out: Path | None
) -> Tuned:
    machine, device = this_machine(), own_device()
    new = Measurements(machine=machine)
    known = cached_measurements(machine) or new
    if out is not None:
        check_writable(out)  # Report a wrong path before the work.
        known = known.updated(measurements_of(machine, out) or new)
    new = new.updated(Measurements(machine=machine, collectives=tuple(collectives)))
    progress, until = _Progress(), time.perf_counter() + _CONFIGURATION_SECONDS
    is_kept = out is None
    shapes = dict.fromkeys(shape for recipe in recipes for shape in kernel_shapes(recipe))
    # The losses come last, because their collectives make a lost GPU harder to leave.
    for shape in sorted(shapes, key=lambda each: each.operation == "loss"):
        progress.print(describe_shape(shape))
        before = known.of_shape(shape)
        try:
            measured = measure_kernel(shape, device, before, until)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            key = "loss_chunk" if shape.operation == "loss" else "micro_batch_size"
            log.warning(
                "%s is not measured, because its equation in float64 does not fit into the free "
                "memory of %s; free some, or give a smaller training.%s",
                describe_shape(shape),
                device,
                key,
            )
            continue
        new = new.updated(Measurements(machine=machine, kernels=(measured,)))
        left_out = {} if before is None else before.lost
        if lost := next((each for n, each in measured.lost.items() if n not in left_out), None):
            then = "it is left out from now on, so run the same command again"
            if _write(known, new, out).path is None:
                then = "run the command with --out FILE until it ends; each time it leaves out more"
            raise UserError(
                f"backend {lost.backend} has made the GPU unusable for this process "
                f"({lost.problem}); {then}"
            )
        # The cache keeps what is measured if the command is killed. ``out`` is replaced only once.
        is_kept = is_kept and _write(known, new, None).path is not None
    for recipe in recipes:
        progress.print(f"matrix products of {recipe.run_dir}")
        products = tuple(measure_products(recipe, device, _PRODUCT_SECONDS))
        new = new.updated(Measurements(machine=machine, products=products))
    progress.print("memory")
    memory = measure_memory(device, _COPY_SECONDS)
    new = new.updated(Measurements(machine=machine, memory=memory))
    if out is None and not is_kept:
        return Tuned(known.updated(new), None)
    return _write(known, new, out)


def _write(known: Measurements, new: Measurements, out: Path | None) -> Tuned:
    """Add new measurements to the known ones, and to those that others have written meanwhile."""
    path = cache_file(new.machine) if out is None else out
    try:
        check_writable(path)
        lock = path.with_name(f"{path.name}.lock")
        with FileLock(lock, format_path(path), "give another --out", patience=math.inf):
            written = measurements_of(new.machine, path)
            found = (known if written is None else known.updated(written)).updated(new)
            write_measurements(path, found)
    except UserError as error:
        if out is not None:
            raise
        log.warning("%s", error)
        return Tuned(known.updated(new), None)
    return Tuned(found, path)


def measure_kernel(
    shape: KernelShape,
    device: torch.device,
    known: KernelMeasurement | None = None,
    until: float = math.inf,
) -> KernelMeasurement:
    """Verify all backends that can compute a shape, and time those that are right.

    ``known`` is an earlier measurement. Its backends that made the GPU unusable are not run again,
    and remain in the result. After the time ``until`` (``time.perf_counter``), no other
    configuration of a backend is tried.
    """
    checks = checks_of(shape, device)
    tried: dict[str, TriedBackend] = {} if known is None else known.lost
    left_out = []
    for name in usable_backends(shape, device):
        if name in tried:
            continue
        if name != base_name(name) and time.perf_counter() > until:
            left_out.append(name)
            continue
        tried[name] = _verified(name, checks, device)
        if tried[name].lost_device:
            break
    else:
        tried |= _timed(tried, checks[0])
        combination = _combination(tried)
        if combination is not None and combination not in tried:
            tried[combination] = _verified(combination, checks, device)
            if not tried[combination].lost_device:
                tried |= _timed(tried, checks[0])
    if left_out:
        print_line(
            f"         {', '.join(left_out)}: not tried, to save time; the same command tries more "
            "configurations when the others are compiled"
        )
    return KernelMeasurement(
        shape=shape,
        candidates=tuple(tried.values()),
        measured_at=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def _verified(name: str, checks: Sequence[Check], device: torch.device) -> TriedBackend:
    error, problem = verify(name, checks)
    is_lost = bool(problem) and _is_lost(device)
    return TriedBackend(backend=name, error=error, problem=problem, lost_device=is_lost)


def _combination(tried: Mapping[str, TriedBackend]) -> str | None:
    """Return the configuration with every change that was faster alone; None if fewer than two."""
    values: dict[str, Any] = {}
    for name, each in tried.items():
        base, _, text = name.partition(":")
        if text and each.seconds is not None and each.seconds < (tried[base].seconds or 0.0):
            changes = Configuration.parse(text)._asdict().items()
            values |= {key: value for key, value in changes if value is not None}
    if values.get("one_pass"):
        values.pop("dq", None)
    return f"triton:{Configuration(**values)}" if len(values) > 1 else None


def _timed(tried: dict[str, TriedBackend], check: Check) -> dict[str, TriedBackend]:
    """Return the right backends with their times."""
    right = [name for name, each in tried.items() if not each.problem]
    samples = {name: passes(check.trial, name, check.grad) for name in right}
    times = time_in_turn(samples, _KERNEL_SECONDS) if right else {}
    return {
        name: tried[name].model_copy(update={"forward": forward, "backward": backward})
        for name, (forward, backward) in times.items()
    }


def _is_lost(device: torch.device) -> bool:
    """Return whether CUDA refuses all further work of this process, as after a wrong address."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
        torch.zeros(1, device=device).item()
    except RuntimeError:
        return True
    return False


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether a tensor did not fit; on a CPU torch raises a RuntimeError without a class."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator: " in str(error)


def _measure_between_ranks(recipes: Sequence[Recipe]) -> list[CollectiveMeasurement]:
    ranks = distributed.get_world_size()
    hosts: list[str] = [""] * ranks
    distributed.all_gather_object(hosts, os.uname().nodename)
    found = []
    for recipe in recipes:
        try:
            recipe.check_ranks(ranks)
        except UserError as error:
            if distributed.get_rank() == 0:
                log.warning("the collectives of %s are not timed: %s", recipe.run_dir, error)
            continue
        with process_groups(recipe.parallel, recipe.training.seed) as parallel_state:
            found += measure_collectives(recipe, parallel_state, hosts)
    return found


def describe_shape(shape: KernelShape) -> str:
    """Return a shape in words, such as "differential: 8 x 256 tokens, 2 + 2 heads of 16, ..."."""
    if shape.operation == "loss":
        return f"loss: {shape.length} tokens, {shape.head_dim} ids, {shape.dtype}"
    heads = f"{shape.signal_heads}"
    heads += f" + {shape.noise_heads}" if shape.noise_heads else ""
    words = [f"{shape.batch} x {shape.length} tokens", f"{heads} heads of {shape.head_dim}"]
    if shape.kv_heads:
        words.append(f"{shape.kv_heads} key-value heads")
    if shape.keys > shape.length:
        words.append(f"{shape.keys} keys")
    words += [shape.dtype, *shape.features]
    if shape.window is not None:
        words.append(f"window {shape.window}")
    if shape.is_deterministic:
        words.append("deterministic")
    return f"{shape.operation}: {', '.join(words)}"


class _Progress:
    """Lines with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def print(self, text: str) -> None:
        print_line(f"{time.perf_counter() - self._start:5.0f} s  {text}")
