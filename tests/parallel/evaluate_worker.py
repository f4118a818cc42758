"""Ranks that evaluate, started through :mod:`tests.ranks`.

The arguments are ``DATA OUT TARGET ...``.
"""

import sys
from pathlib import Path

from diffmegatron.evaluation.evaluate import evaluate


def main() -> None:
    """Measure the loss of every target."""
    data, out, *targets = sys.argv[1:]
    evaluate([Path(each) for each in targets], ["loss"], Path(out), {"data": (data,)}, [])
