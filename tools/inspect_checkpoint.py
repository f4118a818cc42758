"""Print the position and tensors of a checkpoint: ``diffmegatron checkpoint inspect``."""

import sys

from diffmegatron.cli import main

if __name__ == "__main__":
    sys.argv[:1] = ["diffmegatron", "checkpoint", "inspect"]
    main()
