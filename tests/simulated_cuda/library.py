"""Compile ``device_library.cpp`` once for each version of this file and of torch."""

import hashlib
import shutil
import subprocess
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from diffmegatron.file_lock import FileLock
from tests.paths import ROOT

SOURCE = Path(__file__).with_name("device_library.cpp")
# Versions of torch with which the replacements were tested; others may need other replacements.
TORCH = ("2.13",)
# Longest time to wait while another process compiles the library.
_PATIENCE_SECONDS = 900


class UnavailableError(Exception):
    """Raised where the simulation cannot run; the message contains the reason."""


@cache
def library() -> Path:
    """Return the compiled library, built into ``build/`` of the checkout if it is missing.

    Raises:
        UnavailableError: torch is not of a version in :data:`TORCH` or is a CUDA build; or Triton
            or g++ is missing; or g++ fails.
    """
    torch_version = version("torch")
    if not torch_version.startswith(TORCH):
        raise UnavailableError(
            f"the simulation needs torch {TORCH[0]}, and torch {torch_version} is installed"
        )
    import torch

    if torch.version.cuda is not None:
        raise UnavailableError("this build of torch has CUDA itself")
    if find_spec("triton") is None:
        raise UnavailableError("Triton is not installed")
    compiler = shutil.which("g++")
    if compiler is None:
        raise UnavailableError("there is no g++")
    key = hashlib.sha256(SOURCE.read_bytes() + torch_version.encode()).hexdigest()[:16]
    built = ROOT / "build" / "simulated_cuda" / f"{key}.so"
    # Several workers of pytest can need the library at the same time.
    with FileLock(built.with_suffix(".lock"), f"library {built}", "wait", _PATIENCE_SECONDS):
        if not built.exists():
            _compile(compiler, Path(torch.__file__).parent, built)
    return built


def _compile(compiler: str, torch_folder: Path, built: Path) -> None:
    include = torch_folder / "include"
    unfinished = built.with_suffix(".unfinished")
    command = [
        compiler, "-shared", "-fPIC", "-std=c++20", str(SOURCE), "-o", str(unfinished),
        "-I", str(include), "-I", str(include / "torch/csrc/api/include"),
        "-L", str(torch_folder / "lib"), "-lc10", "-ltorch_cpu",
        f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UnavailableError(f"g++ fails: {done.stderr.strip().splitlines()[0]}")
    unfinished.rename(built)
