"""Average the newest checkpoints of a run: ``diffmegatron checkpoint average``."""

import sys

from diffmegatron.cli import main

if __name__ == "__main__":
    sys.argv[:1] = ["diffmegatron", "checkpoint", "average"]
    main()
