"""The hardware, the libraries and the kernels' source that measurements are valid for."""

import hashlib
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from diffmegatron.section import Section

# PyPI names of the libraries whose kernels a training step may run.
_LIBRARIES = ("torch", "triton", "megatron-core", "flash-attn", "flex-head-fa", "flash-attn-4")
_CUDNN_FRONTEND = "nvidia-cudnn-frontend"
_PACKAGE = Path(__file__).parent.parent
# Files with kernels, or with code that launches them.
_KERNELS = ("attention/kernels", "model/cross_entropy_kernel.py")


class Machine(Section):
    """The hardware, the libraries and the kernels' source that measurements are valid for.

    Attributes:
        device_type: device of the measurements.
        name: name of the GPU that CUDA reports, or of the CPU.
        capability: compute capability, such as "9.0"; empty on a CPU.
        driver: version of NVIDIA's driver; empty on a CPU, or if it is unknown.
        cuda: version of CUDA that torch was built for; empty on a CPU.
        threads: number of torch's CPU threads; 0 on a GPU.
        libraries: versions of the installed libraries with kernels, and of cuDNN.
        kernels: hash of the source of this package's kernels, 16 hex digits.
    """

    device_type: Literal["cuda", "cpu"]
    name: str
    capability: str = ""
    driver: str = ""
    cuda: str = ""
    threads: int = 0
    libraries: dict[str, str]
    kernels: str

    @property
    def chip(self) -> int | None:
        """Major compute capability of the GPU; None on a CPU."""
        return int(self.capability.partition(".")[0]) if self.capability else None

    @property
    def digest(self) -> str:
        """Hash of all attributes, 16 hex digits."""
        return _digest(self.model_dump_json().encode())


def this_machine() -> Machine:
    """Return the description of the first GPU, or of the CPU if torch sees no GPU."""
    import torch

    libraries = {name: found for name in _LIBRARIES if (found := _version(name)) is not None}
    kernels = kernels_digest()
    if not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return Machine(
            device_type="cpu",
            name=cpu_name(),
            threads=threads,
            libraries=libraries,
            kernels=kernels,
        )
    if (frontend := _version(_CUDNN_FRONTEND)) is not None:
        libraries[_CUDNN_FRONTEND] = frontend
    if (cudnn := torch.backends.cudnn.version()) is not None:
        libraries["cudnn"] = str(cudnn)
    return Machine(
        device_type="cuda",
        name=torch.cuda.get_device_name(),
        capability="{}.{}".format(*torch.cuda.get_device_capability()),
        driver=_driver(),
        cuda=torch.version.cuda or "",
        libraries=libraries,
        kernels=kernels,
    )


def kernels_digest() -> str:
    """Return a hash (16 hex digits) of the source of this package's kernels."""
    content = b""
    for each in _KERNELS:
        path = _PACKAGE / each
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        content += b"".join(
            file.relative_to(_PACKAGE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0"
            for file in files
        )
    return _digest(content)


def cpu_name() -> str:
    """Return the CPU's model name as in /proc/cpuinfo; without one, the processor type."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.processor() or platform.machine()


def _driver() -> str:
    """Return the version in the file of NVIDIA's kernel module, or "" without this file."""
    try:
        first = Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return ""
    found = re.search(r"\d+\.\d+(\.\d+)?", first)
    return "" if found is None else found[0]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
