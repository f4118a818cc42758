"""The limits that random cases are held to do hold them."""

import time

import pytest
from hypothesis import strategies as st

from tests.robustness.cases import BYTES, for_all, limits, run


def test_what_takes_too_long_or_too_much_fails():
    started = time.process_time()
    with pytest.raises(AssertionError, match="s of the processor"), limits():
        while time.process_time() - started < 1.1:
            pass
    with pytest.raises(MemoryError), limits():
        bytearray(2 * BYTES)
    bytearray(2 * BYTES)


def test_a_case_that_fails_is_found():
    with pytest.raises(ZeroDivisionError):
        for_all(100, False, lambda number: 1 // number, st.integers(0, 9))


def test_a_command_that_says_more_than_a_sentence_fails(monkeypatch):
    monkeypatch.setattr("tests.robustness.cases.main", lambda: print("more") or exit(2))
    with pytest.raises(AssertionError):
        run("plan")
