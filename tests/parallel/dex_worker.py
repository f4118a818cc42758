"""Ranks that run ``select_heads``, started through :mod:`tests.ranks`.

The arguments are ``MODEL DATA OUT METHOD override ...``.
"""

import sys
from pathlib import Path

from diffmegatron.dex.select_heads import select_heads


def main() -> None:
    """Select heads of the model under the layout that the overrides set."""
    model, data, out, method, *overrides = sys.argv[1:]
    select_heads(
        Path(model), Path(data), Path(out), overrides, method=method, share=0.5, sequences=6
    )
