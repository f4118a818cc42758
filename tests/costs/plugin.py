"""A pytest plugin that records the CPU seconds of each test and fixture, children included."""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import forks

RECORDS = "DIFFMEGATRON_TEST_COSTS"


def cpu_seconds() -> float:
    """Return user and system seconds of this process and of the children it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def write(kind: str, **values: object) -> None:
    with Path(os.environ[RECORDS]).open("a") as file:
        file.write(repr({"kind": kind} | values) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    used, began = cpu_seconds(), time.monotonic()
    try:
        return (yield)
    finally:
        wall = time.monotonic() - began
        write("test", id=item.nodeid, cpu=cpu_seconds() - used, wall=wall)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Iterator[object]:
    used = cpu_seconds()
    try:
        return (yield)
    finally:
        name = f"{fixturedef.baseid}::{fixturedef.argname}"
        write("fixture", id=name, cpu=cpu_seconds() - used)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    write("collection", cpu=cpu_seconds())


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    # The forks are children of the server, which notes their seconds.
    for line in forks.used_seconds():
        seconds, _, test = line.partition(" ")
        write("forked", id=test.rpartition(" (")[0], cpu=float(seconds))
