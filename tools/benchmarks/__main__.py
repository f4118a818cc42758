"""Run a benchmark: ``python -m tools.benchmarks NAME [ARGUMENTS]``; ``--list`` lists all names."""

import sys
from collections.abc import Sequence
from importlib import import_module

from tools.benchmarks.registry import BENCHMARKS


def main(argv: Sequence[str]) -> int:
    """Run the benchmark named by the first argument, or list all benchmarks with ``--list``.

    Returns:
        The exit status: 0, or 2 after a mistake of the user.
    """
    if list(argv) == ["--list"]:
        width = max(map(len, BENCHMARKS))
        print("\n".join(f"{name:{width}}  {about}" for name, about in BENCHMARKS.items()))
        return 0
    if not argv or argv[0] not in BENCHMARKS:
        named = f"{argv[0]!r} is not a benchmark" if argv else "the name of a benchmark is missing"
        print(f"error: {named}; give one of {', '.join(BENCHMARKS)}, or --list", file=sys.stderr)
        return 2
    # Imported late because spawned processes import this module and must start fast.
    from diffmegatron.errors import UserError
    from tools.benchmarks.command_line import parse

    try:
        arguments = parse(argv[0], argv[1:])
        import_module(f"tools.benchmarks.{argv[0]}").main(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
