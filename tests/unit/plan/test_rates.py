"""Estimates of `plan` with the rates that `tune` measured, compared with assumed rates."""

import pytest

from diffmegatron.config.attention_backend import attention_shape, planned_backend
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.config.training_config import ChosenKernels
from diffmegatron.errors import UserError
from diffmegatron.measurements.cache import write_measurements
from diffmegatron.measurements.machine import Machine
from diffmegatron.measurements.records import (
    CollectiveMeasurement,
    KernelMeasurement,
    Measurements,
    MemoryMeasurement,
    ProductMeasurement,
    Timing,
    TriedBackend,
)
from diffmegatron.model.accounting.hardware import ACCELERATORS
from diffmegatron.plan import plan_recipe
from diffmegatron.plan.rates import Hardware, Rates, find_hardware
from diffmegatron.plan.search import number_of_ties, search
from diffmegatron.plan.timing import estimate_time
from tests.paths import CONFIGS

GPU = ACCELERATORS["H100"]
MACHINE = Machine(
    device_type="cuda", name="NVIDIA H100 80GB HBM3", libraries={"torch": "2.13"}, kernels="0" * 16
)
# Multiply-adds of the backends per head and (query, key) pair, in units of d: docs/kernels.md.
WORK = {"sdpa_4call": (8, 20), "triton": (6, 14)}


def load(*overrides: str) -> Recipe:
    return load_recipe(CONFIGS / "diff_3b_1t.yaml", overrides)


def timing(seconds: float) -> Timing:
    return Timing(median=seconds, spread=0.0)


def tried(backend: str, recipe: Recipe, slowness: float = 1.0, problem: str = "") -> TriedBackend:
    """Return a backend that reaches 40% of the peak, in the backward pass 40% / ``slowness``."""
    training, heads, d = recipe.training, 12, 128
    pairs = training.micro_batch_size * training.seq_length * (training.seq_length + 1) / 2
    forward, backward = (
        timing(factor * 2 * work * d * heads * pairs / (0.4 * GPU.peak_flops))
        for factor, work in zip((1.0, slowness), WORK[backend], strict=True)
    )
    return TriedBackend(
        backend=backend, error=0.5, problem=problem, forward=forward, backward=backward
    )


def measured(recipe: Recipe, *candidates: TriedBackend) -> Measurements:
    """Return measurements with 60% of the peak in matrix products and 80% of the bandwidth."""
    shape = attention_shape(recipe, recipe.model.attention.kinds[0])
    rows = 4096
    product = ProductMeasurement(
        name="fc1",
        dtype="bfloat16",
        rows=rows,
        inner=rows,
        columns=rows,
        time=timing(2 * rows**3 / (0.6 * GPU.peak_flops)),
    )
    size = 1 << 30
    return Measurements(
        machine=MACHINE,
        kernels=(
            KernelMeasurement(
                shape=shape, candidates=candidates, measured_at="2026-11-28T17:05:00Z"
            ),
        ),
        products=(product,),
        memory=MemoryMeasurement(
            bytes=2 * size, time=timing(2 * size / (0.8 * GPU.memory_bandwidth))
        ),
    )


def hardware(*arguments) -> Hardware:
    return Hardware("H100", Rates.of(measured(*arguments), GPU))


def test_a_gpu_that_reaches_the_assumed_rates_has_the_assumed_times():
    recipe = load()
    assumed = estimate_time(recipe, 1, Hardware("H100"))
    found = estimate_time(recipe, 1, hardware(recipe, tried("sdpa_4call", recipe)))
    # A diagonal of 4,096 pairs is counted in the measured call, and half of it in the estimate.
    assert found.step == pytest.approx(assumed.step, rel=1e-3)
    assert set(assumed.origins.values()) == {"assumed", "none"}
    assert found.origins == {
        "compute": "measured",
        "communication": "none",
        "idle": "none",
        "optimizer": "measured",
        "step": "measured",
    }


@pytest.mark.parametrize("overrides", [[], ["training.micro_batch_size=4", "parallel.tensor=2"]])
def test_a_slower_backward_pass_takes_its_time_also_in_another_layout(overrides):
    """Measure one layout, and estimate the same or another layout with the same kernels."""
    recipe, other = load(), load(*overrides)
    ranks = other.parallel.tensor
    once, twice = (
        estimate_time(other, ranks, hardware(recipe, tried("sdpa_4call", recipe, slowness)))
        for slowness in (1.0, 2.0)
    )
    tokens, layers = 4_194_304 / ranks, 28
    backward = 2 * WORK["sdpa_4call"][1] * 128 * 12 * 2048 * tokens * layers
    more = backward / (0.4 * GPU.peak_flops)
    assert twice.compute - once.compute == pytest.approx(more, rel=1e-3)


def test_auto_is_planned_as_the_fastest_right_backend():
    recipe = load()
    slow, fast = tried("sdpa_4call", recipe), tried("triton", recipe)
    found = hardware(recipe, slow, fast)
    (kind,) = recipe.model.attention.kinds
    assert planned_backend(found.with_backend(recipe), kind) == "triton"
    wrong = hardware(recipe, slow, tried("triton", recipe, problem="dk of the last row"))
    assert planned_backend(wrong.with_backend(recipe), kind) == "sdpa_4call"
    named = load("training.attention_backend=flash_2call")
    assert found.with_backend(named) is named
    # A run keeps the choice that it has recorded, also one of a library.
    kernels = {"attention": "flash_2call", "subtraction": "auto", "origin": "x"}
    kept = ChosenKernels.model_validate({"device": "cuda", "kinds": [kernels]})
    training = recipe.training.model_copy(update={"chosen_kernels": kept})
    run = recipe.model_copy(update={"training": training})
    assert found.with_backend(run) is run and planned_backend(run, kind) == "flash_2call"
    # Training has no measurement of another shape, and chooses by the order.
    other = load("training.micro_batch_size=4")
    assert planned_backend(found.with_backend(other), kind) == planned_backend(other, kind)
    assert planned_backend(other, kind) == "sdpa_4call"
    # No call was measured chunk by chunk, so the choice without measurements stays.
    ring = load("parallel.context=2", "parallel.context_communication=ring")
    assert planned_backend(found.with_backend(ring), kind) == planned_backend(ring, kind)
    assert estimate_time(ring, 2, found).origins["compute"] == "measured in part"


def test_a_file_of_measurements_is_hardware(tmp_path):
    recipe, file = load(), tmp_path / "h100.json"
    write_measurements(file, measured(recipe, tried("triton", recipe)))
    plan = plan_recipe(recipe, 8, str(file))
    assert plan.time.hardware == "H100"
    assert plan.time.origins["compute"] == "measured"
    assert plan.time.origins["communication"] == "assumed"
    assert plan.time.origins["step"] == "measured in part"
    assert plan.memory == plan_recipe(load("training.attention_backend=triton"), 8).memory
    text = "\n".join(plan.assumptions)
    assert "rates: measured on NVIDIA H100 80GB HBM3, 2026-11-28T17:05:00Z" in text
    assert "matrix products: 60% of that peak (measured)" in text
    assert "backend triton (fastest of 1 right backends, measured 2026-11-28T17:05:00Z on" in text
    assert "40% and 40% of the peak (measured)" in text
    assert "network: 70% of 50 GB/s per GPU between nodes (assumed, optimistic)" in text


def test_measurements_of_the_users_gpu_need_no_file(tmp_path, monkeypatch):
    recipe = load()
    monkeypatch.setenv("DIFFMEGATRON_CACHE", str(tmp_path))
    (tmp_path / "measurements_damaged.json").write_text("{")
    found = measured(recipe, tried("triton", recipe))
    write_measurements(tmp_path / "measurements_1.json", found)
    assert find_hardware("H100").rates == Rates.of(found, GPU)
    assert find_hardware("H200") == Hardware("H200")


def test_a_file_of_another_device_or_without_measurements_is_refused(tmp_path):
    file = tmp_path / "measured.json"
    with pytest.raises(UserError, match=r"cannot read .*measured\.json"):
        find_hardware(str(file))
    cpu = MACHINE.model_copy(update={"device_type": "cpu", "name": "AMD EPYC"})
    write_measurements(file, Measurements(machine=cpu))
    with pytest.raises(UserError, match="has measurements of AMD EPYC, which plan does not know"):
        find_hardware(str(file))


def test_measured_collectives_replace_the_assumed_bandwidths():
    """Compare with the bytes that a rank of a ring sends: 2 (k - 1) / k of a summed tensor."""
    size, calls = 1 << 28, []
    for ranks, nodes, bandwidth in ((8, 1, 300e9), (16, 2, 40e9)):
        seconds = 2 * (ranks - 1) / ranks * size / bandwidth
        calls.append(
            CollectiveMeasurement(
                name="gradients",
                operation="all_reduce",
                ranks=ranks,
                nodes=nodes,
                bytes=size,
                time=timing(seconds),
            )
        )
    rates = Rates.of(Measurements(machine=MACHINE, collectives=tuple(calls)), GPU)
    assert rates.links * GPU.link_bandwidth == pytest.approx(300e9)
    assert rates.network_share * rates.network == pytest.approx(40e9)
    assert rates.measured == {"links", "network", "network_share"}


def test_ties_of_a_search_are_closer_if_the_computation_is_measured(tmp_path):
    recipe, file = load(), tmp_path / "h100.json"
    write_measurements(file, measured(recipe, tried("triton", recipe)))
    for name, share in (("H100", 1.1), (str(file), 1.03)):
        found = search(recipe, 64, name)
        steps = [each.time.step for each in found]
        assert number_of_ties(found) == sum(step <= share * steps[0] for step in steps)
    assert {each.time.origins["compute"] for each in found} >= {"measured"}
