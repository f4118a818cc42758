"""Name of the CPU, for the reports of benchmarks."""

import platform
from pathlib import Path


def cpu_name() -> str:
    """Return the CPU's model name as in /proc/cpuinfo; without one, the processor type."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("model name"):
            return line.partition(": ")[2]
    return platform.processor() or platform.machine()
