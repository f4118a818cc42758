"""Keeps the interpreter's tests to their process."""

import os

# triton decides at import whether kernels are interpreted; test_triton_interpreter.py starts the
# process that has it so.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
