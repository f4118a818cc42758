# mypy: disable-error-code="no-untyped-def"
"""The subtraction of DIFF V2 in Triton: `signal - lambda * noise` per token and signal head.

DIFF V2 is the second version of differential attention. The tensor `heads` has the outputs of
softmax attention, `[batch, length, groups * (r + 1), width]`. Each group has r signal heads,
followed by the noise head that they share. Lambda is `[batch, length, groups * r]`. A program
handles M tokens of one group, and loads the noise head once. In the kernels, `ratio` is r. With
SIGMOID, `lambda_ptr` points to the logits of lambda.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..first_order import first_order
from .kernel_launch import on_device
from .tiles import Heads, accumulator_dtype, load_tile, store_tile

ROWS = 32


def subtract_noise(heads: Tensor, lambda_: Tensor, sigmoid: bool = False) -> Tensor:
    """Return `signal - lambda * noise`, `[batch, length, groups * r, width]`."""
    out: Tensor = _SubtractNoise.apply(heads, lambda_, sigmoid)
    return out


class _SubtractNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, lambda_: Tensor, sigmoid: bool) -> Tensor:
        ctx.save_for_backward(heads, lambda_)
        ctx.sigmoid = sigmoid
        heads, lambda_ = _dense(heads), lambda_.contiguous()
        out = heads.new_empty(*lambda_.shape, heads.shape[3])
        grid, sizes, constants = _launch(heads, lambda_, sigmoid)
        with on_device(heads):
            subtract_kernel[grid](heads, lambda_, out, *sizes, heads.stride()[:3], **constants)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        given, lambda_ = ctx.saved_tensors
        heads, grad = _dense(given), _dense(grad)
        dheads = torch.empty_like(given, memory_format=torch.contiguous_format)
        dlambda = torch.empty_like(lambda_, memory_format=torch.contiguous_format)
        grid, sizes, constants = _launch(heads, lambda_, ctx.sigmoid)
        with on_device(heads):
            subtract_backward_kernel[grid](
                grad, heads, lambda_.contiguous(), dheads, dlambda, *sizes,
                grad.stride()[:3], heads.stride()[:3], **constants,
            )  # fmt: skip
        return dheads, dlambda, None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _launch(
    heads: Tensor, lambda_: Tensor, sigmoid: bool
) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """Return the grid, the sizes (length, groups, r) and the keyword arguments of a launch."""
    batch, length, all_heads, width = heads.shape
    signals = lambda_.shape[2]
    groups = all_heads - signals
    constants = {"width": width, "M": ROWS, "SIGMOID": sigmoid, "num_warps": 4}
    grid = (triton.cdiv(length, ROWS) * batch * groups,)
    return grid, (length, groups, signals // groups), constants


@triton.jit
def _place(length, groups, M: tl.constexpr):
    """Return the batch index, the group and the first row (token) of this program."""
    blocks = tl.cdiv(length, M)
    first_row = (tl.program_id(0) % blocks) * M
    group = (tl.program_id(0) // blocks) % groups
    batch = tl.program_id(0) // (blocks * groups)
    return batch, group, first_row


@triton.jit
def _lambda_pointers(lambda_ptr, batch, head, first_row, length, heads, M: tl.constexpr):
    """Return pointers `[M]` into lambda or its gradient, for M rows (tokens) of signal head `head`.

    `heads` is the number of signal heads.
    """
    rows = first_row + tl.arange(0, M)
    return lambda_ptr + (tl.cast(batch, tl.int64) * length + rows.to(tl.int64)) * heads + head


@triton.jit
def subtract_kernel(
    heads_ptr,
    lambda_ptr,
    out_ptr,
    length,
    groups,
    ratio,
    head_strides,
    width: tl.constexpr,
    M: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Compute `signal - lambda * noise` for M rows (tokens) of all signal heads of one group.

    `heads_ptr` points to `[batch, length, groups * (r + 1), width]` with the strides
    `head_strides`. `lambda_ptr` points to a contiguous `[batch, length, groups * r]`, and `out_ptr`
    to the contiguous result `[batch, length, groups * r, width]`. Signal head `head` is head
    `head + group` at `heads_ptr`, because the noise heads of `group` earlier groups precede it.
    """
    ACCUMULATE: tl.constexpr = accumulator_dtype(heads_ptr.dtype.element_ty)
    batch, group, first_row = _place(length, groups, M)
    is_row = first_row + tl.arange(0, M) < length
    heads = Heads(heads_ptr, length, head_strides)
    noise = load_tile(heads, batch, group * (ratio + 1) + ratio, first_row, width, M).to(ACCUMULATE)
    for index in range(ratio):
        head = group * ratio + index
        signal = load_tile(heads, batch, head + group, first_row, width, M).to(ACCUMULATE)
        pointers = _lambda_pointers(lambda_ptr, batch, head, first_row, length, groups * ratio, M)
        weight = tl.load(pointers, mask=is_row, other=0.0).to(ACCUMULATE)
        if SIGMOID:
            weight = 1.0 / (1.0 + tl.exp(-weight))
        out = signal - weight[:, None] * noise
        store_tile(out_ptr, out, batch, head, first_row, length, groups * ratio, width)


@triton.jit
def subtract_backward_kernel(
    grad_ptr,
    heads_ptr,
    lambda_ptr,
    dheads_ptr,
    dlambda_ptr,
    length,
    groups,
    ratio,
    grad_strides,
    head_strides,
    width: tl.constexpr,
    M: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Compute the gradients of the heads and of lambda for M rows (tokens) of one group.

    With dout, the gradient of the result `signal - lambda * noise`:

        dsignal = dout
        dlambda = -sum(dout * noise) over the width
        dnoise = -sum(lambda * dout) over the signal heads of the group

    With SIGMOID, dlambda is multiplied by the sigmoid's derivative, lambda (1 - lambda).

    `grad_ptr` points to dout `[batch, length, groups * r, width]`. `heads_ptr` and `lambda_ptr` are
    as in `subtract_kernel`. The program stores dsignal and dnoise at `dheads_ptr`, and dlambda at
    `dlambda_ptr`, in contiguous tensors with the shapes of heads and lambda.
    """
    ACCUMULATE: tl.constexpr = accumulator_dtype(heads_ptr.dtype.element_ty)
    batch, group, first_row = _place(length, groups, M)
    is_row = first_row + tl.arange(0, M) < length
    all_heads = groups * (ratio + 1)
    noise_head = group * (ratio + 1) + ratio
    heads = Heads(heads_ptr, length, head_strides)
    noise = load_tile(heads, batch, noise_head, first_row, width, M).to(ACCUMULATE)
    grads = Heads(grad_ptr, length, grad_strides)
    dnoise = tl.zeros_like(noise)
    for index in range(ratio):
        head = group * ratio + index
        grad = load_tile(grads, batch, head, first_row, width, M)
        store_tile(dheads_ptr, grad, batch, head + group, first_row, length, all_heads, width)
        grad = grad.to(ACCUMULATE)
        pointers = _lambda_pointers(lambda_ptr, batch, head, first_row, length, groups * ratio, M)
        weight = tl.load(pointers, mask=is_row, other=0.0).to(ACCUMULATE)
        if SIGMOID:
            weight = 1.0 / (1.0 + tl.exp(-weight))
        dnoise -= weight[:, None] * grad
        pointers = _lambda_pointers(dlambda_ptr, batch, head, first_row, length, groups * ratio, M)
        dlambda = -tl.sum(grad * noise, 1)
        if SIGMOID:
            dlambda *= weight * (1.0 - weight)
        tl.store(pointers, dlambda, mask=is_row)
    store_tile(dheads_ptr, dnoise, batch, noise_head, first_row, length, all_heads, width)
