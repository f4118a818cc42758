"""Tokenise a corpus into the files that training reads: the command ``diffmegatron prepare``."""

import sys

from diffmegatron.cli import main

if __name__ == "__main__":
    sys.argv[:1] = ["diffmegatron", "prepare"]
    main()
