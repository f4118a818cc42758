"""Exclude the tests that run kernels in Triton's interpreter, unless this process has it on."""

import os

# Triton decides when it is imported whether it interprets kernels. So test_triton_interpreter.py
# runs these tests in a process with TRITON_INTERPRET=1.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
