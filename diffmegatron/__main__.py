"""``python -m diffmegatron``: the same command line as ``diffmegatron``."""

from diffmegatron.cli import main

if __name__ == "__main__":
    main()
