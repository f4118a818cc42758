# mypy: disable-error-code="no-untyped-def"
"""Cross-entropy in Triton, for logits whose vocabulary is sharded over tensor-parallel ranks.

The kernels read each logit twice and overwrite it with its gradient: 6 bytes of memory traffic per
logit in bf16. In shapes, rows is the number of tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from diffmegatron.attention.kernels.triton.kernel_launch import on_device

BLOCK = 4096  # logits that a Triton program reads at a time
WARPS = 8


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    group: distributed.ProcessGroup | None = None,
    unpadded_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss -log softmax(logits)[label] and log(sum(exp(logits))) of each row, [rows].

    Both are float32 (float64 for float64 logits) and differentiable.

    Args:
        logits: [rows, v], floating point, where v is the size of this rank's vocabulary shard. The
            shards are consecutive ranges of v ids, in the order of the ranks. The backward pass
            overwrites contiguous logits with their gradient.
        labels: [rows] int64, ids in the whole vocabulary, never ids of padding.
        group: tensor-parallel ranks that shard the vocabulary; None if it is not sharded. The
            softmax is over the whole vocabulary, and all ranks get the same values.
        unpadded_size: number of ids in this rank's shard without the padding at its end; None for
            no padding. The softmax excludes logits of padding, and their gradient is 0.
    """
    values: tuple[Tensor, Tensor] = _CrossEntropy.apply(
        logits, labels, group, logits.shape[1] if unpadded_size is None else unpadded_size
    )
    return values


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        group: distributed.ProcessGroup | None,
        unpadded_size: int,
    ) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        rank = 0 if group is None else distributed.get_rank(group)
        own_labels = labels.contiguous() - rank * logits.shape[1]
        largest, total, of_label = _statistics(logits, own_labels, unpadded_size)
        if group is not None and distributed.get_world_size(group) > 1:
            largest, total, of_label = _over_ranks(largest, total, of_label, group)
        log_total = total.log() + largest
        ctx.save_for_backward(logits, own_labels, log_total)
        ctx.unpadded_size = unpadded_size
        return log_total - of_label, log_total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_log_total: Tensor) -> tuple[Tensor, None, None, None]:
        logits, own_labels, log_total = ctx.saved_tensors
        rows, shard_size = logits.shape
        grid = (rows, triton.cdiv(shard_size, BLOCK))
        with on_device(logits):
            gradient_kernel[grid](
                logits, own_labels, log_total, grad.contiguous(), grad_log_total.contiguous(),
                shard_size, ctx.unpadded_size, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
        # The new version number makes autograd raise an error if another backward pass reads the
        # saved logits, which now contain the gradient.
        increment_version(logits)
        return logits, None, None, None


def _statistics(
    logits: Tensor, own_labels: Tensor, unpadded_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (largest logit, sum of exp(logit - largest), label's logit) of each row of this shard.

    `own_labels` are the labels minus the first id of this shard. The label's logit is 0 if the
    label is in the shard of another rank.
    """
    rows, shard_size = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    largest, total, of_label = (logits.new_empty(rows, dtype=dtype) for _ in range(3))
    with on_device(logits):
        statistics_kernel[(rows,)](
            logits, own_labels, largest, total, of_label, shard_size, unpadded_size,
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return largest, total, of_label


def _over_ranks(
    largest: Tensor, total: Tensor, of_label: Tensor, group: distributed.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    overall = largest.clone()
    distributed.all_reduce(overall, op=distributed.ReduceOp.MAX, group=group)
    sums = torch.stack([total * (largest - overall).exp(), of_label])
    distributed.all_reduce(sums, group=group)
    return overall, sums[0], sums[1]


@triton.jit
def statistics_kernel(
    logits_ptr,
    labels_ptr,
    largest_ptr,
    total_ptr,
    of_label_ptr,
    shard_size,
    unpadded_size,
    BLOCK: tl.constexpr,
):
    """Compute the three results of `_statistics` for one row, by online softmax.

    Grid: (rows,). `logits_ptr` points to `[rows, shard_size]`, and `labels_ptr` to `[rows]` labels
    minus the first id of this shard. The program stores its results at `largest_ptr`, `total_ptr`
    and `of_label_ptr`, `[rows]`.
    """
    ACCUMULATE: tl.constexpr = largest_ptr.dtype.element_ty
    row = tl.program_id(0)
    first = logits_ptr + row.to(tl.int64) * shard_size
    largest = tl.full([], -float("inf"), ACCUMULATE)
    total = tl.zeros([], ACCUMULATE)
    for start in range(0, unpadded_size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        is_token = index < unpadded_size
        logits = tl.load(first + index, mask=is_token, other=-float("inf")).to(ACCUMULATE)
        larger = tl.maximum(largest, tl.max(logits, 0))
        # If all logits so far are -inf, the difference -inf - (-inf) is NaN, so subtract 0.
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(logits - shift), 0)
        largest = larger
    label = tl.load(labels_ptr + row)
    is_own = (label >= 0) & (label < unpadded_size)
    of_label = tl.load(first + label, mask=is_own, other=0.0).to(ACCUMULATE)
    tl.store(largest_ptr + row, largest)
    tl.store(total_ptr + row, total)
    tl.store(of_label_ptr + row, of_label)


@triton.jit
def gradient_kernel(
    logits_ptr,
    labels_ptr,
    log_total_ptr,
    grad_ptr,
    grad_log_total_ptr,
    shard_size,
    unpadded_size,
    BLOCK: tl.constexpr,
):
    """Overwrite one block of one row's logits with their gradient.

    The gradient is grad * (softmax(logits) - onehot(label)) + grad_log_total * softmax(logits).

    Grid: (rows, blocks of BLOCK logits). `logits_ptr` points to `[rows, shard_size]`. The other
    pointers point to `[rows]`: labels minus the first id of this shard, log(sum(exp(logits))) over
    the whole vocabulary, and the gradients of each loss and of each log(sum(exp(logits))). The
    gradient of padding is 0.
    """
    ACCUMULATE: tl.constexpr = log_total_ptr.dtype.element_ty
    row = tl.program_id(0)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row.to(tl.int64) * shard_size + index
    logits = tl.load(pointers, mask=index < unpadded_size, other=-float("inf")).to(ACCUMULATE)
    softmax = tl.exp(logits - tl.load(log_total_ptr + row))
    at_label = (index == tl.load(labels_ptr + row)).to(ACCUMULATE)
    gradient = tl.load(grad_ptr + row) * (softmax - at_label)
    gradient += tl.load(grad_log_total_ptr + row) * softmax
    tl.store(pointers, gradient, mask=index < shard_size)
