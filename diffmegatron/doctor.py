"""``diffmegatron doctor``: report installed packages, hardware, chosen backends and problems."""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from diffmegatron.attention.kernels.registry import OPS, Operation
from diffmegatron.errors import UserError
from diffmegatron.model.accounting.hardware import find_accelerator

# PyPI name of each library -> what the library is used for.
REQUIRED = {
    "torch": "tensors, process groups",
    "megatron-core": "layers, tensor and pipeline parallelism",
    "deepspeed": "ZeRO",
    "transformers": "verifies exports",
    "tiktoken": "tokenizers",
}
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
    "vllm": "evaluate and generate --engine vllm; pip install vllm",
    "wandb": "training.wandb; pip install -e '.[wandb]'",
}
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
    """Tables of findings by title, and a sentence for each thing that is missing or unusable."""

    sections: Mapping[str, tuple[DoctorRow, ...]]
    missing: tuple[str, ...]


def print_examination() -> None:
    """Examine this machine and print the report to standard output."""
    print_report(examine(), Console())


def examine() -> Report:
    """Return a report on this machine; nothing is downloaded and no process is started."""
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    gpus = _gpus()
    layers, layers_problem = _layer_host()
    tokenizer, tokenizer_problem = _cl100k()
    return Report(
        sections={
            "Installed": (DoctorRow("Python", platform.python_version()), *_packages(packages)),
            "Hardware": (DoctorRow("CPU cores", str(os.cpu_count())), *gpus),
            "Choices": (layers, _communication(), *_attention_choices()),
            **{
                f"{OPS[each].capitalize()}, by training.attention_backend": _backends(each)
                for each in get_args(Operation)
            },
            "Tokenizer": (tokenizer,),
            "Launch": tuple(_launch()),
        },
        missing=(*_missing(packages), *layers_problem, *tokenizer_problem),
    )


def print_report(report: Report, console: Console) -> None:
    """Print a report as tables."""
    for title, findings in report.sections.items():
        table = Table(title=title, title_justify="left", show_header=False)
        for finding in findings:
            table.add_row(*map(Text, (finding.name, finding.value, finding.note)))
        console.print(table)
    if report.missing:
        console.print("[bold]Missing[/bold]")
    for sentence in report.missing:
        console.print(Text(f"- {sentence}"))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _packages(packages: Mapping[str, str | None]) -> Iterator[DoctorRow]:
    for name, purpose in (REQUIRED | OPTIONAL).items():
        yield DoctorRow(name, packages[name] or "not installed", purpose)


def _gpus() -> tuple[DoctorRow, ...]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda or "none"
        return (DoctorRow("GPU", "none", f"torch's CUDA version: {built}"),)
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


def _communication() -> DoctorRow:
    import torch

    if torch.cuda.is_available():
        return DoctorRow("communication", "nccl", "one rank per GPU")
    return DoctorRow("communication", "gloo", "no GPU is visible")


def _attention_choices() -> Iterator[DoctorRow]:
    from diffmegatron.attention.kernels.installed_backends import importable_libraries
    from diffmegatron.attention.kernels.registry import OPS, Call, choose_backend

    for op, what in OPS.items():
        for device in ("cpu", "cuda"):
            for dtype in ("float32", "bfloat16"):
                call = Call(op, device, dtype, _HEAD_DIM)
                try:
                    backend, reason = choose_backend("auto", call, importable_libraries())
                except ValueError as error:
                    backend, reason = "none", str(error)
                yield DoctorRow(f"{what}, {device} {dtype}", backend, reason)


def _backends(operation: Operation) -> tuple[DoctorRow, ...]:
    from diffmegatron.attention.kernels.api import backend_table

    found, without_cuda = [], []
    for name, can_run, why in backend_table(operation, head_dim=_HEAD_DIM):
        if not can_run and why.startswith("needs a cuda device"):
            without_cuda.append(name)
        else:
            found.append(DoctorRow(name, "can run" if can_run else "cannot run", why))
    if without_cuda:
        found.append(DoctorRow(", ".join(without_cuda), "cannot run", "need a CUDA device"))
    return tuple(found)


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
    if torch.version.cuda is None:
        yield f"torch {torch.__version__} is built without CUDA; install a CUDA build of it."
    elif not torch.cuda.is_available():
        yield "torch sees no GPU; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES."
    elif torch.cuda.get_device_capability() < BF16_CAPABILITY:
        yield f"{torch.cuda.get_device_name()} has no bf16; set training.precision=fp32."
    for name, purpose in OPTIONAL.items():
        if not packages[name]:
            yield f"{name} is not installed ({purpose})."
