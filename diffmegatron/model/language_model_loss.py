"""Cross-entropy loss of the next token, optionally in chunks of the sequence to save memory.

The loss may have a second term, the z-loss: a coefficient times the squared log(sum(exp(logits)))
of each token (PaLM, section 5; ST-MoE, equation 5). It keeps the logits small. In shapes, terms is
left out without a z-loss, and otherwise 2: the cross-entropy and the z-loss.

In shapes, b is the number of sequences in a microbatch, s the number of positions on this
context-parallel rank, and v the size of this tensor-parallel rank's vocabulary shard.
"""

import importlib.util
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from diffmegatron.config.training_config import LossKernel, even_chunk


def cross_entropy(
    labels: Tensor,
    logits: Tensor,
    group: ProcessGroup | None,
    unpadded_size: int,
    z_loss: float,
    kernel: LossKernel = "auto",
) -> Tensor:
    """Return the loss of each token, [terms, b, s], from labels [b, s] and logits [s, b, v].

    The logits may be overwritten. The softmax covers the vocabulary shards of all ranks of
    ``group`` (None: of one rank), and excludes vocabulary padding, which begins at index
    ``unpadded_size`` of the shard. ``z_loss`` is the coefficient of the z-loss; 0 for none. With
    the ``kernel`` "auto", Megatron-core's cross-entropy runs where the Triton kernel cannot run.
    """
    if kernel == "triton" or (kernel == "auto" and _has_kernel(logits)):
        from diffmegatron.model import cross_entropy_kernel

        losses, log_total = cross_entropy_kernel.cross_entropy(
            logits.flatten(0, 1), labels.T.flatten(), group, unpadded_size
        )
        if z_loss:
            losses = torch.stack([losses, z_loss * log_total.square()])
        return losses.unflatten(-1, logits.shape[:2]).mT.contiguous()
    if unpadded_size < logits.shape[-1]:
        # Write in place, because a copy would need too much memory. The backward pass of
        # the output layer does not need the logits.
        with torch.no_grad():
            logits[..., unpadded_size:] = -torch.inf
    labels = labels.T.contiguous()
    if not z_loss:
        losses = vocab_parallel_cross_entropy(logits, labels)
        return losses.T.contiguous()
    rank = 0 if group is None else group.rank()
    logits, of_label = _LabelLogits.apply(logits, labels - rank * logits.shape[-1])
    losses = vocab_parallel_cross_entropy(logits, labels)
    log_total = losses + reduce_from_tensor_model_parallel_region(of_label, group=group)
    return torch.stack([losses, z_loss * log_total.square()]).mT.contiguous()


class _LabelLogits(torch.autograd.Function):
    """Return logits [s, b, v] unchanged, and the float32 logit of each label, [s, b].

    ``own_labels`` [s, b] are labels minus the first id of this rank's vocabulary shard. A label's
    logit is 0 if the label is in another shard. The gradients of the labels' logits are added in
    place to that of all logits, because ``torch.gather`` would need another tensor of its size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, own_labels: Tensor) -> tuple[Tensor, Tensor]:
        is_other = (own_labels < 0) | (own_labels >= logits.shape[-1])
        index = own_labels.masked_fill(is_other, 0).unsqueeze(-1)
        ctx.save_for_backward(index, is_other)
        of_label = logits.gather(-1, index).squeeze(-1)
        # Autograd refuses that Megatron's function overwrites a view, and a detached tensor is not
        # a view.
        return logits.detach(), of_label.float().masked_fill(is_other, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_of_label: Tensor) -> tuple[Tensor, None]:
        index, is_other = ctx.saved_tensors
        added = grad_of_label.masked_fill(is_other, 0.0).to(grad.dtype)
        return grad.scatter_add_(-1, index, added.unsqueeze(-1)), None


def _has_kernel(logits: Tensor) -> bool:
    """Return whether the Triton kernel can run: on a GPU, and in Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def loss_kernels(device: torch.device) -> list[LossKernel]:
    """Return the kernels of the loss that can run on a device."""
    names: list[LossKernel] = ["triton", "megatron"]
    return names if _has_kernel(torch.empty(0, device=device)) else names[1:]


def chunked_losses(
    labels: Tensor,
    hidden: Tensor,
    weight: Tensor,
    *,
    size: int,
    group: ProcessGroup,
    sequence_parallel: bool,
    unpadded_size: int,
    z_loss: float,
    kernel: LossKernel = "auto",
) -> Tensor:
    """Return the loss of each token, [terms, b, s], computed in chunks of positions.

    Only one chunk's logits are in memory at a time. The backward pass computes them again, and adds
    the chunks' gradients of the weight within the products, so that no chunk's gradient of the
    weight is in memory.

    Args:
        labels: ids, [b, s].
        hidden: input of the output layer, [s, b, hidden size]; under sequence parallelism over t
            ranks, [s / t, b, hidden size].
        weight: weight of the output layer, [v, hidden size].
        size: largest number of positions of a chunk. A chunk has these positions of all b
            sequences. Under sequence parallelism, each rank contributes ceil(``size`` / t).
        group: tensor-parallel ranks.
        unpadded_size: number of ids in this rank's vocabulary shard that are not padding.
        z_loss: coefficient of the z-loss; 0 for none.
        kernel: kernel of the loss, as in :func:`cross_entropy`.
    """
    shards = group.size() if sequence_parallel else 1
    length = even_chunk(hidden.shape[0], -(-size // shards))
    chunks = _Chunks(length, group, shards, unpadded_size, z_loss, kernel)
    losses: Tensor = _ChunkedLosses.apply(chunks, labels, hidden, weight)
    return losses


class _Chunks(NamedTuple):
    """Layout of chunks; a chunk has at most ``length`` positions of each of the ``shards``."""

    length: int
    group: ProcessGroup
    shards: int
    unpadded_size: int
    z_loss: float
    kernel: LossKernel

    def ranges(self, hidden: Tensor) -> Iterator[slice]:
        """Yield the range of each chunk within this rank's hidden states."""
        for start in range(0, hidden.shape[0], self.length):
            yield slice(start, start + self.length)

    def hidden_states(self, hidden: Tensor, own: slice) -> Tensor:
        """Return a chunk's hidden states from all shards."""
        chunk = hidden[own]
        if self.shards == 1:
            return chunk
        return gather_from_sequence_parallel_region(chunk, group=self.group)

    def losses(self, labels: Tensor, own: slice, logits: Tensor) -> Tensor:
        """Return a chunk's losses, [terms, b, shards, positions of a shard]."""
        own_labels = self.by_shard(labels)[..., own].flatten(1)
        found = cross_entropy(
            own_labels, logits, self.group, self.unpadded_size, self.z_loss, self.kernel
        )
        return self.by_shard(found)

    def logits_gradient(self, labels: Tensor, own: slice, logits: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of a chunk's logits, [tokens, v].

        ``grad`` is the gradient of all losses, [terms, b, s].
        """
        with torch.enable_grad():
            losses = self.losses(labels, own, logits.requires_grad_())
            (dlogits,) = torch.autograd.grad(losses, logits, self.by_shard(grad)[..., own])
        return dlogits.flatten(0, 1)

    def write_hidden_gradient(self, dlogits: Tensor, weight: Tensor, out: Tensor) -> None:
        """Write the gradient of a chunk's hidden states, summed over the vocabulary's shards."""
        if self.shards == 1:
            torch.mm(dlogits, weight, out=out.flatten(0, 1))
            if self.group.size() > 1:
                distributed.all_reduce(out, group=self.group)
        else:
            whole = dlogits.mm(weight)
            distributed.reduce_scatter_tensor(out.flatten(0, 1), whole, group=self.group)

    def by_shard(self, by_token: Tensor) -> Tensor:
        """View values of tokens, [..., positions], as [..., shards, positions of a shard]."""
        return by_token.unflatten(-1, (self.shards, -1))


class _ChunkedLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chunks: _Chunks, labels: Tensor, hidden: Tensor, weight: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.chunks, ctx.labels = chunks, labels
        losses = [
            chunks.losses(labels, own, chunks.hidden_states(hidden, own).matmul(weight.t()))
            for own in chunks.ranges(hidden)
        ]
        return torch.cat(losses, dim=-1).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden, weight), chunks, labels = ctx.saved_tensors, ctx.chunks, ctx.labels
        _, _, needs_hidden, needs_weight = ctx.needs_input_grad
        dhidden = torch.empty_like(hidden) if needs_hidden else None
        dweight: Tensor | None = None
        for own in chunks.ranges(hidden):
            whole = chunks.hidden_states(hidden, own)
            dlogits = chunks.logits_gradient(labels, own, whole.matmul(weight.t()), grad)
            if needs_weight and dweight is None:
                dweight = dlogits.t().mm(whole.flatten(0, 1))
            elif dweight is not None:
                dweight.addmm_(dlogits.t(), whole.flatten(0, 1))
            del whole
            if dhidden is not None:
                chunks.write_hidden_gradient(dlogits, weight, dhidden[own])
            # Free the gradient before the next chunk's logits are computed.
            del dlogits
        return None, None, dhidden, dweight
