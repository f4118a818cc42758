"""Export a checkpoint to a Hugging Face folder: the command ``diffmegatron export``."""

import sys

from diffmegatron.cli import main

if __name__ == "__main__":
    sys.argv[:1] = ["diffmegatron", "export"]
    main()
