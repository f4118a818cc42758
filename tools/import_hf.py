"""Import a Hugging Face model as a run to start from: the command ``diffmegatron import``."""

import sys

from diffmegatron.cli import main

if __name__ == "__main__":
    sys.argv[:1] = ["diffmegatron", "import"]
    main()
