"""Verification of a backend's values and gradients against the equation in plain torch.

Errors are root mean squares of differences from the equation in float64. The error of a tensor may
be at most twice that of the equation in the dtype of the inputs. To find a single wrong row, the
tensor is also compared in segments, 16 consecutive rows of a head. The error of a segment varies
more, and may be at most four times that of the equation. A lambda or a weight is one segment.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from diffmegatron.measurements.records import KernelShape
from diffmegatron.tuning.trials import Inputs, Trial, draw_trial, last_group, same_numbers

TOLERANCE, SEGMENT_TOLERANCE = 2.0, 4.0
# Calls of each check, and of the check of the order of sums, which must give the same bits.
_CALLS, _DETERMINISTIC_CALLS = 2, 20
# Factor of the queries in the check with large logits.
_LARGE = 8.0
# Longest sequence of the checks other than that of the shape itself.
_SHORT = 1024
_SEGMENT_ROWS = 16
# Errors of this many float32 roundings, relative to the tensor's root mean square, are allowed
# where the equation itself has none, such as in the gradient of a document of one token.
_ROUNDINGS = 64
# Most multiply-adds of the equation for all groups of heads.
_MOST_WORK = {"cpu": 2e10, "cuda": 2e13}
# Largest number of scores that the equation computes at once, and fewest blocks of rows. The errors
# of the blocks' sums give the scale of the error of a lambda, which is a single number.
_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}
_BLOCKS = 8


@dataclass(frozen=True)
class Expected:
    """A tensor of the equation in float64, and the allowed errors, of the whole and by segment."""

    value: Tensor
    of_whole: Tensor
    of_segments: Tensor

    def error(self, found: Tensor) -> float:
        """Return the largest error divided by the allowed error; inf for NaN."""
        difference = found.detach().to(self.value.dtype) - self.value
        whole = _root_mean_square(difference) / self.of_whole
        segments = _segments(difference) / self.of_segments
        worst = float(torch.maximum(whole, segments.max()))
        return worst if math.isfinite(worst) else math.inf


@dataclass(frozen=True)
class Check:
    """A trial with the results that it must have.

    Attributes:
        name: name for messages, such as "large logits"; empty for the shape itself.
        grad: gradient of the result.
        expected: expected tensors by name: "the result" and "the gradient of NAME".
        is_part: whether `expected` has only the tensors' :func:`last_group`. ``grad`` is 0 in the
            others, because the equation of all groups would take too long.
    """

    name: str
    trial: Trial
    grad: Tensor
    expected: dict[str, Expected]
    is_part: bool


class Verification(NamedTuple):
    """Outcome of all checks of a backend: the worst relative error, and why it is wrong, or ""."""

    error: float | None
    problem: str


def checks_of(shape: KernelShape, device: torch.device) -> list[Check]:
    """Return the checks of a shape; the first is the shape itself with all of its sequences."""
    checks = [_check("", draw_trial(shape, device))]
    short = _with_length(shape, min(shape.length, _SHORT))
    if shape.operation != "subtraction":
        large = draw_trial(short, device).scaled_logits(_LARGE)
        checks.append(_check("large logits", large))
    for length in sorted({max(1, short.length - 3), min(short.length, 77)} - {shape.length}):
        trial = draw_trial(_with_length(shape, length), device)
        checks.append(_check(f"length {length}", trial))
    return checks


def verify(backend: str, checks: Sequence[Check]) -> Verification:
    """Return whether a backend passes all checks; no check follows the first that fails."""
    worst = 0.0
    for check in checks:
        where = f" ({check.name})" if check.name else ""
        try:
            for call, error, name in _errors(backend, check):
                worst = max(worst, error)
                if error > 1:
                    again = f" in call {call + 1}" if call else ""
                    return Verification(
                        worst if math.isfinite(worst) else None,
                        f"{name} has {error:.3g} times the allowed error{again}{where}",
                    )
            if check.trial.shape.is_deterministic and not check.name:
                _check_same_bits(backend, check)
        except _BitsError as error:
            return Verification(worst, str(error))
        except Exception as error:  # A library may raise any error, and other backends can follow.
            lines = f"{type(error).__name__}: {error}".splitlines()
            return Verification(None, f"{lines[0]}{where}")
    return Verification(worst, "")


class _BitsError(Exception):
    """Other bits in another call."""


def results(trial: Trial, backend: str, grad: Tensor) -> dict[str, Tensor]:
    """Return the result of a backend and its gradients by name, as in :class:`Check`."""
    leaves = {name: x.detach().requires_grad_() for name, x in trial.inputs.items()}
    with trial.sums():
        out = trial.call(leaves, backend)
        found = torch.autograd.grad(out, list(leaves.values()), grad)
    return {"the result": out} | _named(leaves, found)


def _named(leaves: Inputs, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
    names = (f"the gradient of {name}" for name in leaves)
    return dict(zip(names, gradients, strict=True))


def _errors(backend: str, check: Check) -> Iterator[tuple[int, float, str]]:
    """Yield (number of the call, error relative to the allowed one, name) of every tensor."""
    for call in range(_CALLS):
        found = results(check.trial, backend, check.grad)
        for name, expected in check.expected.items():
            x = last_group(found[name], check.trial.shape) if check.is_part else found[name]
            yield call, expected.error(x), name


def _check_same_bits(backend: str, check: Check) -> None:
    first = results(check.trial, backend, check.grad)
    for call in range(1, _DETERMINISTIC_CALLS):
        for name, x in results(check.trial, backend, check.grad).items():
            if not torch.equal(x, first[name]):
                raise _BitsError(
                    f"{name} has other bits in call {call + 1}, and training.deterministic is set"
                )


def _with_length(shape: KernelShape, length: int) -> KernelShape:
    """Return the shape with fewer queries, and as many fewer keys."""
    keys = max(0, shape.keys - shape.length + length)
    if shape.keys > shape.length:
        keys = min(keys, length + _SHORT)
    return shape.model_copy(update={"length": length, "keys": keys})


def _check(name: str, trial: Trial) -> Check:
    """Compute the equation in the inputs' dtype and in float64."""
    first = next(iter(trial.inputs.values()))
    widths = {"differential": 2 * first.shape[3], "loss": 1}
    width = widths.get(trial.shape.operation, first.shape[3])
    rows = (*first.shape[:2], trial.shape.signal_heads, width)
    with same_numbers(first.device, seed=1):
        grad = torch.randn(rows, device=first.device, dtype=first.dtype)
    part, part_grad, is_part = trial, grad, _multiply_adds(trial) > _MOST_WORK[first.device.type]
    if is_part:
        part, part_grad = trial.last_group(), last_group(grad, trial.shape)
        whole = torch.zeros_like(grad)
        last_group(whole, trial.shape).copy_(part_grad)
        grad = whole
    # On a GPU float64 can be sixty times slower, and float32 is exact enough for 16 bits.
    is_narrow = first.is_cuda and first.dtype != torch.float32
    wide = torch.float32 if is_narrow else torch.float64
    truth, plain = (_Equation(part, each, part_grad, wide) for each in (wide, first.dtype))
    expected = {each: _expected(each, truth, plain) for each in truth.results}
    return Check(name, trial, grad, expected, is_part)


def _expected(name: str, truth: "_Equation", plain: "_Equation") -> Expected:
    value, blocks = truth.results[name], truth.of_blocks(name)
    whole, segments = (
        measure(plain.results[name] - value) for measure in (_root_mean_square, _segments)
    )
    magnitude = _root_mean_square(value)
    if blocks is not None:
        # The sum of all rows may be much smaller than its terms, whose rounding errors it has. The
        # error of a single number may be small by chance: take three standard deviations.
        spread = _root_sum_square(blocks - torch.stack(plain.blocks[_input(name)]))
        scale = 3 * spread if value.dim() == 0 else spread
        whole, segments = torch.maximum(whole, scale), torch.maximum(segments, scale)
        magnitude = torch.maximum(magnitude, _root_sum_square(blocks))
    floor = _ROUNDINGS * torch.finfo(torch.float32).eps * magnitude
    floor = floor.clamp(min=torch.finfo(torch.float32).tiny)
    return Expected(value, TOLERANCE * whole + floor, SEGMENT_TOLERANCE * segments + floor)


def _multiply_adds(trial: Trial) -> float:
    """Return the approximate multiply-adds of the equation, forward and backward."""
    shape, chunks = trial.shape, 2 if "chunks" in trial.shape.features else 1
    heads = shape.batch * (shape.signal_heads + shape.noise_heads)
    return 12.0 * shape.head_dim * heads * chunks * shape.length * chunks * shape.keys


class _Equation:
    """Results and gradients of a trial by the equation in plain torch, in one dtype.

    They are sums of dtype ``wide`` over blocks of rows. ``blocks`` has the gradients of lambda and
    of the norm's weight, by name, one per block.
    """

    def __init__(self, trial: Trial, dtype: torch.dtype, grad: Tensor, wide: torch.dtype) -> None:
        # Parameters in float32 stay float32, as in the network.
        leaves = {
            name: x.detach().to(torch.promote_types(dtype, x.dtype) if x.dim() < 4 else dtype)
            for name, x in trial.inputs.items()
        }
        leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        sums = {name: torch.zeros_like(x, dtype=wide) for name, x in leaves.items()}
        shared = [name for name, x in leaves.items() if x.dim() < 3]
        self.blocks: dict[str, list[Tensor]] = {name: [] for name in shared}
        outs = []
        for rows, out in trial.blocks(leaves, _rows_of_block(trial)):
            found = torch.autograd.grad(out, list(leaves.values()), grad[:, rows].to(out.dtype))
            for (name, total), x in zip(sums.items(), found, strict=True):
                total += x
                if name in self.blocks:
                    self.blocks[name].append(x.to(wide))
            outs.append(out.detach().to(wide))
        self.results = {"the result": torch.cat(outs, 1)} | _named(leaves, list(sums.values()))

    def of_blocks(self, name: str) -> Tensor | None:
        """Return the gradients of lambda or of the norm by block, [blocks, ...]; else None."""
        found = self.blocks.get(_input(name))
        return None if found is None else torch.stack(found)


def _input(name: str) -> str:
    return name.removeprefix("the gradient of ")


def _rows_of_block(trial: Trial) -> int:
    first, shape = next(iter(trial.inputs.values())), trial.shape
    heads = shape.batch * (shape.signal_heads + shape.noise_heads)
    chunks = 2 if "chunks" in shape.features else 1
    most = _SCORES[first.device.type] // (heads * max(1, chunks * shape.keys))
    return max(1, min(most, -(-first.shape[1] // _BLOCKS)))


def _root_mean_square(x: Tensor) -> Tensor:
    return x.detach().square().mean().sqrt()


def _root_sum_square(blocks: Tensor) -> Tensor:
    """Return the root of the sum over blocks of the mean squares of their values, [blocks, ...]."""
    return blocks.detach().reshape(len(blocks), -1).square().mean(1).sum().sqrt()


def _segments(difference: Tensor) -> Tensor:
    """Return the root mean square of each segment: [b, segments, heads], or [1]."""
    if difference.dim() < 3:
        return _root_mean_square(difference).reshape(1)
    squares = difference.detach().square()
    by_row = squares.mean(-1) if squares.dim() == 4 else squares
    rows = _SEGMENT_ROWS if squares.dim() == 4 else 4 * _SEGMENT_ROWS
    missing = -by_row.shape[1] % rows
    sums = torch.nn.functional.pad(by_row, (0, 0, 0, missing)).unflatten(1, (-1, rows)).sum(2)
    counts = torch.full_like(sums[:1, :, :1], rows)
    counts[:, -1] -= missing
    return (sums / counts).sqrt()
