"""Configurations of the Triton attention kernels, which a backend's name may contain.

The backend "triton" has the default form and block sizes. The name of another configuration follows
a colon and separates its parts by plus signs, as in "triton:one_pass+forward=64x64x4x3". This
module does not import torch.
"""

import re
from typing import Any, NamedTuple

_FORMS = {"split": False, "one_pass": True}
_PART = re.compile(r"(split|one_pass)|(forward|dkdv|dq)=(\d{1,3})x(\d{1,3})x(\d{1,2})x(\d)")


class BlockSizes(NamedTuple):
    """Block sizes of one kernel (M query rows, N keys), and the options of its compilation.

    The kernel's loop loads tiles `num_stages - 1` iterations before their use. If `licm` is True,
    the compiler moves loop-invariant code before the loop, and its results occupy registers in the
    loop.
    """

    M: int
    N: int
    num_warps: int
    num_stages: int
    licm: bool = True


class Configuration(NamedTuple):
    """Form and block sizes of a call's kernels; None stands for the default.

    Attributes:
        one_pass: whether the backward kernel of dK and dV also computes dQ. With
            `torch.use_deterministic_algorithms` it never does, because the order of its sums
            changes from run to run.
        forward, dkdv, dq: M, N, warps and stages of a kernel's `BlockSizes`. `one_pass` runs no
            kernel dq.
    """

    one_pass: bool | None = None
    forward: tuple[int, int, int, int] | None = None
    dkdv: tuple[int, int, int, int] | None = None
    dq: tuple[int, int, int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> "Configuration":
        """Return the configuration with this name, or raise ValueError."""
        values: dict[str, Any] = {}
        for part in text.split("+"):
            match = _PART.fullmatch(part)
            if match is None:
                raise ValueError(f"{part!r} is not a part of a configuration")
            form, kernel, *numbers = match.groups()
            values[kernel or "one_pass"] = _FORMS[form] if form else _checked(*map(int, numbers))
        found = cls(**values)
        if found.one_pass and found.dq:
            raise ValueError(f"{text!r} has block sizes of dq, a kernel that one_pass does not run")
        if str(found) != text:
            raise ValueError(f"{text!r} should be {str(found)!r}")
        return found

    def __str__(self) -> str:
        """Return the name of the configuration, empty for the default one."""
        forms = [form for form, value in _FORMS.items() if value is self.one_pass]
        blocks = {name: getattr(self, name) for name in self._fields[1:]}
        sizes = [f"{name}={'x'.join(map(str, each))}" for name, each in blocks.items() if each]
        return "+".join(forms + sizes)

    def blocks(self, kernel: str, default: BlockSizes) -> BlockSizes:
        """Return the block sizes of a kernel, "forward", "dkdv" or "dq"."""
        if (sizes := getattr(self, kernel)) is None:
            return default
        rows, keys, warps, stages = sizes
        return BlockSizes(rows, keys, warps, stages, default.licm)


def _checked(*sizes: int) -> tuple[int, ...]:
    rows, keys, warps, stages = sizes
    powers = all(n & (n - 1) == 0 for n in (rows, keys, warps))
    if not (powers and rows >= 16 and keys >= 16 and 1 <= warps <= 16 and stages >= 1):
        raise ValueError(f"block sizes {sizes} need powers of 2, at least 16 x 16, and a stage")
    return sizes
