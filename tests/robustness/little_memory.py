"""Program that runs diffmegatron with little memory: ``little_memory MIB WORD...``."""

import resource
import sys
from pathlib import Path

from diffmegatron.cli import main


def limit_memory(mib: int) -> None:
    """Let this process allocate ``mib`` MiB in addition to what it has; stacks do not count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (used,) = (int(line.split()[1]) for line in lines if line.startswith("VmData:"))
    allowed = (used << 10) + (mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))


if __name__ == "__main__":
    limit_memory(int(sys.argv[1]))
    sys.argv[:] = ["diffmegatron", *sys.argv[2:]]
    main()
