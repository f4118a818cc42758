"""Measurements of a machine: their file, and which file a machine uses."""

import pytest

from diffmegatron.errors import UserError
from diffmegatron.measurements import machine as machines
from diffmegatron.measurements.cache import (
    cache_file,
    cached_measurements,
    read_measurements,
    write_measurements,
)
from diffmegatron.measurements.machine import Machine, this_machine
from diffmegatron.measurements.records import (
    KernelMeasurement,
    KernelShape,
    Measurements,
    MemoryMeasurement,
    ProductMeasurement,
    Timing,
    TriedBackend,
)
from tests.permissions import without_roots_power

MACHINE = Machine(device_type="cpu", name="a CPU", threads=1, libraries={"torch": "2"}, kernels="0")
SHAPE = KernelShape(
    operation="softmax", dtype="float32", batch=1, length=8, keys=8, head_dim=4, signal_heads=2
)


def timing(seconds: float) -> Timing:
    return Timing(median=seconds, spread=0.1 * seconds)


def right(backend: str, seconds: float) -> TriedBackend:
    each = timing(seconds / 2)
    return TriedBackend(backend=backend, error=0.5, forward=each, backward=each)


def measurement(*candidates: TriedBackend, shape: KernelShape = SHAPE) -> KernelMeasurement:
    return KernelMeasurement(shape=shape, candidates=candidates, measured_at="2026-11-28T17:00:00Z")


MEASURED = Measurements(
    machine=MACHINE,
    kernels=(measurement(right("sdpa", 2e-3), right("blocked", 1e-3)),),
    products=(
        ProductMeasurement(
            name="linear_qkv", dtype="float32", rows=4, inner=5, columns=6, time=timing(1e-6)
        ),
    ),
    memory=MemoryMeasurement(bytes=1 << 30, time=timing(0.5)),
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFMEGATRON_CACHE", str(tmp_path / "own"))
    return tmp_path / "own"


def test_the_folder_is_the_variables_or_the_cache_of_the_user(monkeypatch):
    name = f"measurements_{MACHINE.digest}.json"
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("DIFFMEGATRON_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert str(cache_file(MACHINE)) == f"/own/{name}"
    monkeypatch.setenv("DIFFMEGATRON_CACHE", "")
    assert str(cache_file(MACHINE)) == f"/shared/diffmegatron/{name}"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(cache_file(MACHINE)) == f"/home/user/.cache/diffmegatron/{name}"


def test_written_measurements_are_read_back(folder):
    assert cached_measurements(MACHINE) is None
    write_measurements(cache_file(MACHINE), MEASURED)
    assert cached_measurements(MACHINE) == MEASURED
    assert list(folder.iterdir()) == [cache_file(MACHINE)]
    assert MEASURED.products[0].flops_per_second == pytest.approx(2 * 4 * 5 * 6 / 1e-6)
    assert MEASURED.memory.bytes_per_second == pytest.approx(2**31)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "another CPU"},
        {"threads": 2},
        {"driver": "570.1"},
        {"cuda": "13.0"},
        {"capability": "9.0"},
        {"libraries": {"torch": "3"}},
        {"kernels": "1"},
    ],
    ids=str,
)
def test_measurements_of_anything_else_are_not_used(change, folder, caplog):
    other = MACHINE.model_copy(update=change)
    write_measurements(cache_file(MACHINE), MEASURED)
    assert cached_measurements(other) is None
    assert not caplog.text, "measurements of another machine are in another file"
    write_measurements(cache_file(other), MEASURED)
    assert cached_measurements(other) is None
    assert "has measurements of another machine (a CPU)" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'{"machine": {}}'])
def test_a_damaged_file_is_reported_and_not_used(content, folder, caplog):
    path = cache_file(MACHINE)
    path.parent.mkdir()
    path.write_bytes(content)
    assert cached_measurements(MACHINE) is None
    (record,) = caplog.records
    assert f"{path} is damaged and cannot be used" in record.message
    assert "'diffmegatron tune' replaces it" in record.message
    with pytest.raises(UserError, match="is damaged and cannot be used"):
        read_measurements(path)


def test_a_folder_without_write_permission_is_one_sentence(folder):
    folder.mkdir(mode=0o500)
    sentence = r"cannot write the measurements to .*: Permission denied; give another file"
    with without_roots_power(), pytest.raises(UserError, match=sentence):
        write_measurements(cache_file(MACHINE), MEASURED)


def test_new_kernels_are_another_machine(tmp_path, monkeypatch):
    found = this_machine()
    assert found.device_type in ("cpu", "cuda") and found.libraries["torch"]
    package = tmp_path / "package"
    for name in ("attention/kernels/a.py", "model/cross_entropy_kernel.py"):
        file = package / name
        file.parent.mkdir(parents=True)
        file.write_text("one = 1\n")
    monkeypatch.setattr(machines, "_PACKAGE", package)
    digests = {machines.kernels_digest()}
    for name in ("attention/kernels/a.py", "model/cross_entropy_kernel.py"):
        (package / name).write_text("two = 2\n")
        digests.add(machines.kernels_digest())
    (package / "attention/kernels/a.py").rename(package / "attention/kernels/b.py")
    digests.add(machines.kernels_digest())
    assert len(digests) == 4


def test_a_gpu_has_the_chip_of_its_capability():
    assert MACHINE.chip is None
    assert MACHINE.model_copy(update={"capability": "12.1"}).chip == 12


def test_the_fastest_is_right():
    wrong = right("flex", 1e-4).model_copy(update={"problem": "the gradient of k2 is wrong"})
    found = measurement(wrong, right("sdpa", 2e-3), right("blocked", 1e-3)).fastest
    assert found is not None and found.backend == "blocked"
    assert measurement(wrong).fastest is None


def test_a_shape_with_fewer_keys_than_queries_is_damage():
    with pytest.raises(ValueError, match="keys 7 is below length 8"):
        KernelShape.model_validate(SHAPE.model_dump() | {"keys": 7})
    KernelShape.model_validate(SHAPE.model_dump() | {"operation": "subtraction", "keys": 0})


def test_newer_measurements_replace_those_of_the_same_shape():
    longer = SHAPE.model_copy(update={"length": 16, "keys": 16})
    newer = Measurements(
        machine=MACHINE,
        kernels=(measurement(right("sdpa", 1e-4)), measurement(right("sdpa", 1), shape=longer)),
    )
    both = MEASURED.updated(newer)
    assert both.of_shape(SHAPE) == newer.kernels[0] and both.of_shape(longer) == newer.kernels[1]
    assert both.products == MEASURED.products and both.memory == MEASURED.memory
