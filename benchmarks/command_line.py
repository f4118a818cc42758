"""What every benchmark's command line shares."""

import argparse
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def make_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments after a benchmark's name.

    Args:
        module: ``__name__`` of the benchmark.
        about: its docstring, printed as it is written.
    """
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {module.rpartition('.')[2]}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
