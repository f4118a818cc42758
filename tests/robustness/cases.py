"""Random cases with limits on time, memory and error messages, for the tests of this folder."""

import io
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy, tuples

from diffmegatron.cli import main

SECONDS = 1.0
BYTES = 1 << 30
LONGEST_SENTENCE = 1_500


def for_all(cases: int, is_long: bool, check: Callable[..., None], *drawn: SearchStrategy) -> None:
    """Run ``check`` on random cases within :func:`limits`.

    Args:
        cases: number of cases.
        is_long: whether every call draws new cases. If False, the cases are always the same.
        check: function that is called with the values of a case.
        drawn: strategy for each value.
    """

    def within(values: tuple[object, ...]) -> None:
        with limits():
            check(*values)

    apply = settings(
        max_examples=cases,
        database=None,
        derandomize=not is_long,
        suppress_health_check=list(HealthCheck),
    )
    apply(given(tuples(*drawn))(within))()


@contextmanager
def limits() -> Iterator[None]:
    """Fail if the body needs more than a second of CPU time or a GiB of additional memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    allowed = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (allowed, before[1]))
    started = time.process_time()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    spent = time.process_time() - started
    assert spent < SECONDS, f"{spent:.2f} s of the processor"


def run(*arguments: str) -> int:
    """Run a command in this process, and return its exit status.

    Check that the status is 0, or 2 with one sentence on standard error.
    """
    out, err = io.StringIO(), io.StringIO()
    command = mock.patch.object(sys, "argv", ["diffmegatron", *arguments])
    with command, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    if status == 0:
        assert not err.getvalue()
        return status
    assert status == 2
    assert not out.getvalue()
    assert err.getvalue().startswith("error: ")
    check_sentence(err.getvalue().removesuffix("\n"))
    return status


def check_sentence(text: str) -> None:
    """Check that a text is one short line and can be encoded as UTF-8."""
    assert "\n" not in text
    assert len(text) < LONGEST_SENTENCE
    text.encode()
