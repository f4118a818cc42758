"""Run exports in vLLM, in an interpreter of its own environment.

The variable ``VLLM_PYTHON`` names the interpreter. ``make vllm`` creates such an environment, whose
interpreter is ``.vllm/bin/python``.
"""

import os
import sysconfig
from pathlib import Path

from tests.paths import ROOT

PYTHON = "VLLM_PYTHON"


def interpreter() -> str | None:
    """Return the path that ``VLLM_PYTHON`` names, from ROOT if relative; None if it is unset."""
    given = os.environ.get(PYTHON)
    return str(ROOT / given) if given else None


def command(module: str, *arguments: object) -> list[str]:
    """Return a command that runs a module of the tests with vLLM and this package.

    This environment's packages follow those of vLLM's environment, which has other versions.
    """
    found = interpreter()
    assert found is not None
    paths = [str(ROOT), sysconfig.get_path("purelib")]
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    start = f"import runpy, sys; sys.path += {paths!r}; {run}"
    return [found, "-P", "-c", start, *map(str, arguments)]


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of such a command; ``home`` is the folder of caches."""
    return os.environ | {
        # The engine otherwise runs in a process of its own, with another import of all libraries.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(home / "vllm"),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(home / "hf"),
    }
