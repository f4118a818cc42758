"""Context manager in which file permission bits also restrict root."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

# _DAC has the bits of CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH. _VERSION is the version of the
# structures below. Both numbers are from linux/capability.h.
_DAC = 0b110
_VERSION = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


@contextmanager
def without_roots_power() -> Iterator[None]:
    """Drop the capabilities with which root ignores file permission bits, in this thread only.

    The capabilities are restored when the context ends. For any other user, nothing changes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(_VERSION, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    before = sets[0].effective
    sets[0].effective &= ~_DAC
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = before
        assert libc.capset(ctypes.byref(header), sets) == 0
