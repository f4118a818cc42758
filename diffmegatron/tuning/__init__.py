"""Verification and timing of kernels on the machine that runs them, for ``diffmegatron tune``."""
