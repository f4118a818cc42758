"""Tests that a random case which exceeds a limit fails."""

import time

import pytest
from hypothesis import strategies as st

from tests.robustness.cases import BYTES, for_all, limits, run


def test_a_case_over_the_time_or_memory_limit_fails():
    started = time.process_time()
    with pytest.raises(AssertionError, match="s of the processor"), limits():
        while time.process_time() - started < 1.1:
            pass
    with pytest.raises(MemoryError), limits():
        bytearray(2 * BYTES)
    bytearray(2 * BYTES)


def test_a_failing_case_is_found():
    with pytest.raises(ZeroDivisionError):
        for_all(100, False, lambda number: 1 // number, st.integers(0, 9))


def test_standard_output_of_a_refused_command_is_detected(monkeypatch):
    monkeypatch.setattr("tests.robustness.cases.main", lambda: print("more") or exit(2))
    with pytest.raises(AssertionError):
        run("plan")
