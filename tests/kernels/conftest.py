"""Exclude the tests that run kernels in Triton's interpreter, unless ``TRITON_INTERPRET`` is 1."""

import os

# Triton uses the value that TRITON_INTERPRET has when Triton is imported. Therefore,
# test_triton_interpreter.py runs these tests in a separate process with TRITON_INTERPRET=1.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
