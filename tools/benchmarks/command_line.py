"""Command-line parser that all benchmarks use."""

import argparse


def make_parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments after a benchmark's name.

    Args:
        module: ``__name__`` of the benchmark.
        about: docstring of the benchmark, printed without reformatting.
    """
    return argparse.ArgumentParser(
        prog=f"python -m tools.benchmarks {module.rpartition('.')[2]}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
