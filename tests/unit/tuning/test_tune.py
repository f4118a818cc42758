"""``tune``: which backends it finds right, what it stores, and what it prints."""

import json
from unittest import mock

import pytest
import torch

from diffmegatron.attention.kernels.installed_backends import installed_backend
from diffmegatron.attention.kernels.pytorch import blocked
from diffmegatron.attention.kernels.registry import DIFFERENTIAL
from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.data.index.corpus_manifest import with_document_mask
from diffmegatron.errors import UserError
from diffmegatron.measurements.cache import (
    cache_file,
    cached_measurements,
    read_measurements,
    write_measurements,
)
from diffmegatron.measurements.machine import this_machine
from diffmegatron.measurements.records import (
    KernelMeasurement,
    KernelShape,
    Measurements,
    TriedBackend,
)
from diffmegatron.model import language_model_loss
from diffmegatron.parallel.parallel_state import process_groups
from diffmegatron.tuning import tune as tuning
from diffmegatron.tuning.step import measured_step
from diffmegatron.tuning.tables import kernel_rows, print_tuned
from diffmegatron.tuning.timing import passes
from diffmegatron.tuning.verification import Verification, checks_of, verify
from tests.paths import RESULTS
from tests.permissions import without_roots_power
from tests.unit.measurements.test_cache import right
from tests.unit.tuning.backends import FUNCTIONS, stand_in

CPU = torch.device("cpu")
SHAPE = KernelShape(
    operation="differential",
    dtype="float32",
    batch=2,
    length=64,
    keys=64,
    head_dim=8,
    signal_heads=4,
    noise_heads=2,
    kv_heads=2,
    has_norm=True,
)


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    """Measure for a short time, and store in a new folder."""
    for name in ("_KERNEL_SECONDS", "_PRODUCT_SECONDS", "_COPY_SECONDS"):
        monkeypatch.setattr(tuning, name, 0.0)
    monkeypatch.setenv("DIFFMEGATRON_CACHE", str(tmp_path / "cache"))
    yield
    installed_backend.cache_clear()


@pytest.fixture
def register(monkeypatch):
    """Return a function that adds stand-ins to the backends of differential attention."""

    def add(*names: str) -> None:
        for name in names:
            monkeypatch.setitem(DIFFERENTIAL, name, stand_in(name))

    return add


def shapes() -> list[KernelShape]:
    """Return shapes with every feature, and both dtypes."""
    one = {"noise_heads": 0, "has_norm": False, "operation": "softmax"}
    packed = {"batch": 1, "length": 128, "keys": 128, "features": ("documents",)}
    ring = {"length": 32, "keys": 32}
    masked = ("chunks", "documents", "masked chunks", "offsets")
    subtraction = {"operation": "subtraction", "keys": 0, "kv_heads": 0, "has_norm": False}
    changes = [
        {},
        {"dtype": "bfloat16"},
        one,
        one | {"dtype": "bfloat16"},
        {"noise_heads": 4, "has_norm": False},
        packed,
        one | packed,
        ring | {"features": ("chunks",)},
        one | ring | {"features": ("chunks",)},
        ring | {"batch": 1, "features": masked},
        {"features": ("windows",), "window": 9},
        one | ring | {"features": ("chunks", "masked chunks", "offsets", "windows"), "window": 9},
        {"length": 16},
        {"length": 16, "batch": 1, "features": ("documents", "offsets")},
        subtraction,
        {"is_deterministic": True},
    ]
    return [SHAPE.model_copy(update=each) for each in changes]


@pytest.mark.parametrize("shape", shapes(), ids=tuning.describe_shape)
def test_every_backend_of_a_cpu_is_right(shape):
    checks = checks_of(shape, CPU)
    names = tuning.usable_backends(shape, CPU)
    assert len(names) >= (1 if shape.operation == "subtraction" else 2)
    assert {name: verify(name, checks).problem for name in names} == dict.fromkeys(names, "")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("wrong_in_one_gradient", "the gradient of k2 has "),
        ("wrong_in_one_row", "the result has "),
        ("wrong_at_a_length", "the result has "),
        ("wrong_off_the_block_size", "(length 61)"),
        ("wrong_with_large_logits", "(large logits)"),
        ("wrong_in_its_second_call", "times the allowed error in call 2"),
        ("not_a_number", "the result has inf times the allowed error"),
        ("fails", "RuntimeError: no kernel image is available"),
    ],
)
def test_a_wrong_backend_is_named_with_its_error(name, problem, register):
    register(name)
    error, found = verify(name, checks_of(SHAPE, CPU))
    assert problem in found and "\n" not in found
    assert (error is None) == (name in ("fails", "not_a_number")) and (error is None or error > 1)


@pytest.fixture
def loss_of_one_rank():
    """Return checks of a loss, with the process group that Megatron-core's function needs."""
    shape = KernelShape(
        operation="loss", dtype="bfloat16", batch=1, length=96, head_dim=50, signal_heads=1,
        kv_heads=1,
    )  # fmt: skip
    with process_groups(ParallelConfig(), 0):
        yield checks_of(shape, CPU)


def test_a_wrong_loss_is_named_with_its_error(loss_of_one_rank, monkeypatch):
    assert tuning.usable_backends(loss_of_one_rank[0].trial.shape, CPU) == ["megatron"]
    assert verify("megatron", loss_of_one_rank).problem == ""
    megatrons = language_model_loss.vocab_parallel_cross_entropy

    def wrong_row(logits, labels):
        return (
            megatrons(logits, labels)
            * torch.where(torch.arange(len(logits)) == 9, 1.01, 1)[:, None]
        )

    for function, problem in (
        (wrong_row, "the result has "),
        (lambda logits, labels: megatrons(logits.clamp(max=9.0), labels), "(large logits)"),
        (lambda logits, labels: megatrons(logits * 1.01, labels), "the result has "),
    ):
        monkeypatch.setattr(language_model_loss, "vocab_parallel_cross_entropy", function)
        assert problem in verify("megatron", loss_of_one_rank).problem


def test_part_of_a_large_shape_is_compared(monkeypatch, register):
    from diffmegatron.tuning import verification

    monkeypatch.setitem(verification._MOST_WORK, "cpu", 0)
    checks = checks_of(SHAPE, CPU)
    assert all(each.is_part for each in checks)
    assert verify("blocked", checks).problem == ""
    register("wrong_in_one_gradient", "wrong_in_one_row")
    for name in ("wrong_in_one_gradient", "wrong_in_one_row"):
        assert verify(name, checks).problem


def test_other_bits_are_wrong_if_the_run_is_deterministic(register, monkeypatch):
    shape = SHAPE.model_copy(update={"is_deterministic": True})
    calls = iter(range(100))

    def one_bit(call):
        out = blocked.attend(call)
        return torch.nextafter(out, out + 1) if next(calls) == 15 else out

    monkeypatch.setitem(FUNCTIONS, "slow", one_bit)
    register("slow")
    problem = verify("slow", checks_of(shape, CPU)).problem
    assert problem.startswith("the result has other bits in call ")


def test_a_deterministic_shape_is_timed_with_deterministic_sums(register, monkeypatch):
    seen = set()

    def observing(call):
        seen.add(torch.are_deterministic_algorithms_enabled())
        return blocked.attend(call)

    monkeypatch.setitem(FUNCTIONS, "slow", observing)
    register("slow")
    check = checks_of(SHAPE.model_copy(update={"is_deterministic": True}), CPU)[0]
    passes(check.trial, "slow", check.grad)()
    assert seen == {True}


def test_the_fastest_right_backend_is_chosen(register):
    register("slow", *(name for name in FUNCTIONS if name.startswith("wrong")))
    measured = tuning.measure_kernel(SHAPE, CPU)
    by_name = {each.backend: each for each in measured.candidates}
    assert all(by_name[name].problem for name in by_name if name.startswith("wrong"))
    assert all(by_name[name].seconds is None for name in by_name if name.startswith("wrong"))
    assert by_name["slow"].problem == "" and by_name["slow"].forward.median >= 0.02
    assert measured.fastest is not None
    assert measured.fastest.backend in ("reference", "blocked", "sdpa_4call")


def test_a_backend_that_lost_the_gpu_is_not_run_again(monkeypatch, register):
    register("fails")
    monkeypatch.setattr(tuning, "_is_lost", lambda device: True)
    first = tuning.measure_kernel(SHAPE, CPU)
    assert first.candidates[-1].lost_device and first.fastest is None
    monkeypatch.setattr(tuning, "_is_lost", lambda device: False)
    register("slow")
    again = tuning.measure_kernel(SHAPE, CPU, first)
    assert first.candidates[-1] in again.candidates and again.fastest is not None


def test_tune_stores_prints_and_adds_to_earlier_measurements(tiny_recipe, tmp_path, capsys):
    recipe = with_document_mask(tiny_recipe())
    other = with_document_mask(
        tiny_recipe("model.attention={kind: diff_v2, num_heads: 4, num_kv_heads: 2, head_dim: 16}")
    )
    first = tuning.tune([recipe])
    assert first is not None and first.path == cache_file(this_machine())
    assert cached_measurements(this_machine()) == first.measurements
    both = tuning.tune([other])
    assert both is not None and cached_measurements(this_machine()) == both.measurements
    assert {each.shape.operation for each in both.measurements.kernels} == {
        *("differential", "softmax", "subtraction", "loss")
    }
    print_tuned(both, [recipe, other], ranks=1)
    printed = capsys.readouterr().out
    assert printed.count(" s  ") >= 5, "a line for each shape, products and memory"
    assert printed.count("1.00") >= 3 and "sdpa_4call" in printed
    assert printed.count("the computation of a step on one of 1 ranks takes") == 2
    out = tmp_path / "a.json"
    tuning.tune([other], out)
    assert json.loads(out.read_text())["machine"]["kernels"] == this_machine().kernels


def test_tunes_to_one_file_lose_no_measurement(tiny_recipe, tmp_path, monkeypatch):
    """Write measurements of another tune while this one runs, and lose the GPU in each shape.

    The third call of the command knows both losses, so it ends.
    """
    recipe, out = with_document_mask(tiny_recipe()), tmp_path / "a.json"
    other = KernelMeasurement(shape=SHAPE, candidates=(), measured_at="now")
    measure, known = tuning.measure_kernel, []

    def measure_and_lose(shape, device, before, _):
        write_measurements(out, Measurements(machine=this_machine(), kernels=(other,)))
        known.append(before)
        lost = TriedBackend(backend="blocked", problem="a wrong address", lost_device=True)
        return measure(shape, device, before).model_copy(update={"candidates": (lost,)})

    monkeypatch.setattr(tuning, "measure_kernel", measure_and_lose)
    for _ in range(2):
        with pytest.raises(UserError, match=r"blocked has made the GPU unusable .* left out from"):
            tuning.tune([recipe], out)
    assert other in read_measurements(out).kernels and known[0] is None
    assert known[1].candidates[0].lost_device
    finished = tuning.tune([recipe], out)
    assert finished is not None and all(each.lost for each in finished.measurements.kernels[1:])
    assert not [*tmp_path.glob("*.lock")]


def test_an_interrupted_tune_keeps_what_it_has_measured(tiny_recipe, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "measure_products", interrupt)
    recipe = with_document_mask(tiny_recipe())
    with pytest.raises(KeyboardInterrupt):
        tuning.tune([recipe])
    found = cached_measurements(this_machine())
    assert [each.shape for each in found.kernels] == tuning.kernel_shapes(recipe)


def test_changes_that_are_faster_alone_are_tried_together(monkeypatch):
    seconds = {"triton": 2.0, "triton:split": 2.1, "triton:forward=64x64x4x3": 1.9}
    seconds |= {"triton:dq=64x32x4x3": 1.8, "sdpa_4call": 1.7}
    both = "triton:forward=64x64x4x3+dq=64x32x4x3"
    monkeypatch.setattr(tuning, "usable_backends", lambda *_: [*seconds])
    monkeypatch.setattr(tuning, "verify", lambda *_: Verification(0.5, ""))
    times = seconds | {both: 1.6}

    def timed(tried, _):
        return {name: right(name, times[name]) for name, each in tried.items() if not each.problem}

    monkeypatch.setattr(tuning, "_timed", timed)
    measured = tuning.measure_kernel(SHAPE, CPU)
    assert [each.backend for each in measured.candidates] == [*times]
    assert measured.fastest is not None and measured.fastest.backend == both
    lost = TriedBackend(backend=both, problem="a wrong address", lost_device=True)
    known = measured.model_copy(update={"candidates": (lost,)})
    again = tuning.measure_kernel(SHAPE, CPU, known)
    assert [each.backend for each in again.candidates] == [both, *seconds]
    times["triton:dq=64x32x4x3"] = 2.0
    assert len(tuning.measure_kernel(SHAPE, CPU).candidates) == len(seconds)


def test_the_form_without_dq_is_tried_without_its_block_sizes():
    seconds = {"triton": 2.0, "triton:one_pass": 1.9, "triton:dq=64x32x4x3": 1.8}
    tried = {name: right(name, each) for name, each in seconds.items()}
    assert tuning._combination(tried) is None
    tried["triton:dkdv=64x32x4x3"] = right("triton:dkdv=64x32x4x3", 1.8)
    assert tuning._combination(tried) == "triton:one_pass+dkdv=64x32x4x3"


def test_no_configuration_is_tried_after_its_time(monkeypatch, capsys):
    monkeypatch.setattr(tuning, "usable_backends", lambda *_: ["blocked", "triton:split"])
    measured = tuning.measure_kernel(SHAPE, CPU, until=0.0)
    assert [each.backend for each in measured.candidates] == ["blocked"]
    assert "triton:split: not tried, to save time; " in capsys.readouterr().out


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: no 9 bytes")],
)
def test_a_shape_whose_equation_does_not_fit_is_named_and_left_out(
    error, tiny_recipe, monkeypatch, caplog
):
    def checks(shape, device):
        if shape.operation == "loss":
            raise error
        return checks_of(shape, device)

    monkeypatch.setattr(tuning, "checks_of", checks)
    tuned = tuning.tune([with_document_mask(tiny_recipe())])
    assert [each.shape.operation for each in tuned.measurements.kernels] == ["differential"]
    assert tuned.measurements.products
    assert "loss: 256 tokens" in caplog.text and "smaller training.loss_chunk" in caplog.text


def test_another_error_of_the_equation_ends_tune(tiny_recipe, monkeypatch):
    monkeypatch.setattr(tuning, "checks_of", mock.Mock(side_effect=RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        tuning.tune([with_document_mask(tiny_recipe())])


def test_products_of_another_dtype_are_not_those_of_a_run(tiny_recipe):
    tuned = tuning.tune([with_document_mask(tiny_recipe())])
    found = tuned.measurements
    assert measured_step(tiny_recipe(), 1, found) is not None
    products = [each.model_copy(update={"dtype": "bfloat16"}) for each in found.products]
    assert measured_step(tiny_recipe(), 1, found.model_copy(update={"products": products})) is None


def test_a_damaged_file_is_replaced_and_a_folder_without_permission_reported(
    tiny_recipe, tmp_path, caplog
):
    recipe = with_document_mask(tiny_recipe())
    path = cache_file(this_machine())
    path.parent.mkdir()
    path.write_text("{")
    found = tuning.tune([recipe])
    assert "is damaged and cannot be used" in caplog.text
    assert found is not None and cached_measurements(this_machine()) == found.measurements
    path.unlink()
    path.parent.chmod(0o500)
    with without_roots_power():
        found = tuning.tune([recipe])
        assert found is not None and found.path is None and found.measurements.kernels
        assert "cannot write the measurements" in caplog.text
        with pytest.raises(UserError, match="cannot write the measurements"):
            tuning.tune([recipe], path)


def test_a_tried_backend_without_times_has_no_seconds():
    assert TriedBackend(backend="sdpa").seconds is None


def test_the_pages_have_the_measured_rows():
    first, again = (
        read_measurements(RESULTS / f"{n}.json") for n in ("tune_cpu", "tune_cpu_again")
    )
    table = (RESULTS / "tune_cpu.md").read_text()
    several = [each for each in first.kernels if len(each.candidates) > 1]
    assert len(several) == 6
    for each in several:
        for row in kernel_rows(each):
            assert f"| {tuning.describe_shape(each.shape)} | {' | '.join(row)} |" in table
        second = again.of_shape(each.shape)
        assert each.fastest and second and second.fastest
        times = {tried.backend: tried.seconds for tried in second.candidates}
        assert times[each.fastest.backend] <= 1.03 * second.fastest.seconds
