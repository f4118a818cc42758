"""Forward and backward passes over this rank's microbatches, for training and evaluation.

A token is counted if its ``loss_mask`` is 1; only counted tokens contribute to summed and mean
losses. Shapes: b sequences in a microbatch, s positions on this context-parallel rank, v entries of
this tensor-parallel rank's vocabulary shard. With a z-loss and in training mode, terms is 2: the
cross-entropy and the z-loss. Otherwise it is left out, and the loss is the cross-entropy.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed
from torch.autograd.graph import saved_tensors_hooks

from diffmegatron.attention.context_parallel.zigzag import to_sequence_order
from diffmegatron.data.loader import Batch
from diffmegatron.model.network import Network
from diffmegatron.parallel.parallel_state import ParallelState

# Called on the last pipeline stage, with each microbatch and the cross-entropy of its tokens,
# [b, s].
BatchObserver = Callable[[Batch, Tensor], None]


@dataclass(frozen=True)
class LossSum:
    """The loss of a global batch, the same on every rank.

    Attributes:
        total: summed cross-entropy of the counted tokens in nats, 0-dim float32. It is not finite
            if the loss of any token is not finite, even of a token that is not counted.
        z_total: summed z-loss of the counted tokens, 0-dim float32; 0 without a z-loss.
        tokens: number of counted tokens, 0-dim float32.
    """

    total: Tensor
    z_total: Tensor
    tokens: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean loss of the counted tokens, 0-dim float32; ``total`` if no token is counted."""
        return self.total / self.tokens.clamp(min=1.0)

    @property
    def z_mean(self) -> Tensor:
        """Mean z-loss of the counted tokens, 0-dim float32; ``z_total`` if no token is counted."""
        return self.z_total / self.tokens.clamp(min=1.0)


class Engine(Protocol):
    """Network that accumulates and reduces gradients, such as ``ZeroEngine``."""

    network: Network

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Run the forward pass of :class:`~diffmegatron.model.network.Network`."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradients of a microbatch's scaled loss (0-dim) to the accumulated gradients.

        ``is_last`` is True for the last microbatch of the step.
        """


def forward_backward(
    engine: Engine,
    microbatches: Sequence[Batch],
    parallel_state: ParallelState,
    *,
    offload_activations: bool = False,
    observe: BatchObserver | None = None,
) -> LossSum:
    """Run the forward and backward passes of a step on its mean loss, and return the loss.

    Every counted token of the global batch has the same weight, even if microbatches have different
    numbers of counted tokens. If no token is counted, all gradients are 0. With a z-loss, the
    gradients are those of the sum of both terms.

    Args:
        microbatches: microbatches on this rank's device (``batches.on_this_rank``).
        offload_activations: whether tensors saved for backward are kept in host memory.
        observe: called with each microbatch and the detached cross-entropy of its tokens.
    """
    count = _count(microbatches, parallel_state)
    # DeepSpeed averages gradients over the data x context parallel ranks. The two sizes turn the
    # average into a sum.
    weight = parallel_state.data_size * parallel_state.context_size / count.clamp(min=1.0)
    offloaded = (
        partial(offloaded_activations, engine.network) if offload_activations else nullcontext
    )
    if parallel_state.pipeline_size > 1:
        losses = _pipeline(engine.network, microbatches, parallel_state, weight, offloaded, observe)
    else:
        losses = []
        # With FP8, the layers then quantize their updated weights again, as Megatron's pipeline
        # schedules let them do in each step.
        for stage in engine.network.virtual_stages:
            stage.set_is_first_microbatch()
        for number, batch in enumerate(microbatches, 1):
            with offloaded():
                loss = summed_loss(engine, batch, observe)
            engine.backward(loss.sum() * weight, is_last=number == len(microbatches))
            losses.append(loss.detach())
    return LossSum(*_sum_over_ranks(losses, parallel_state), count)


@torch.no_grad()
def forward_only(
    network: Network, microbatches: Sequence[Batch], parallel_state: ParallelState
) -> LossSum:
    """Return the loss of a global batch like :func:`forward_backward`, without gradients."""
    if parallel_state.pipeline_size > 1:
        losses = _pipeline(network, microbatches, parallel_state, None, nullcontext)
    else:
        losses = [summed_loss(network, batch) for batch in microbatches]
    count = _count(microbatches, parallel_state)
    return LossSum(*_sum_over_ranks(losses, parallel_state), count)


def token_losses(network: Network, batch: Batch, parallel_state: ParallelState) -> Tensor:
    """Return the loss of every token of a batch; every rank must call this.

    Args:
        batch: microbatch of ``batches.on_this_rank``, the same on every data-parallel rank.

    Returns:
        Losses of the unsharded sequences, float32 [b, s x context size], the same on every rank.
    """
    return _forward(network, batch, parallel_state, Tensor.float, has_labels=True)


def next_tokens(network: Network, batch: Batch, parallel_state: ParallelState) -> Tensor:
    """Return the id of the most likely next token at every position, int64.

    The arguments and the result's shape are as in :func:`token_losses`. The id is -1 where a logit
    is not finite.
    """
    read = network.virtual_stages[-1].likeliest_tokens
    return _forward(network, batch, parallel_state, read, has_labels=False)


@torch.no_grad()
def _forward(
    network: Network,
    batch: Batch,
    parallel_state: ParallelState,
    read: Callable[[Tensor], Tensor],
    *,
    has_labels: bool,
) -> Tensor:
    """Run the network, and return one value per token on every rank, [b, s x context size].

    ``read`` computes the values [b, s] of this rank's tokens from the output of the last pipeline
    stage: losses if ``has_labels``, else logits. The values of whole sequences are then gathered.
    """
    own: Tensor | None
    if parallel_state.pipeline_size > 1:
        # An interleaved schedule needs a multiple of pipeline_size microbatches: repeat the batch.
        count = parallel_state.pipeline_size if len(network.virtual_stages) > 1 else 1

        def step(microbatches, stage):  # type: ignore[no-untyped-def]
            output = _output(stage, next(microbatches), has_labels=has_labels)
            return output, lambda last: (last.new_zeros(()), {"read": read(last)})

        found = _scheduled(network, [batch] * count, parallel_state, step, forward_only=True)
        own = found[0]["read"] if found else None
    else:
        own = read(_output(network, batch, has_labels=has_labels))
    return _on_all_ranks(own, batch, parallel_state, torch.float32 if has_labels else torch.int64)


def _on_all_ranks(
    own: Tensor | None, batch: Batch, parallel_state: ParallelState, dtype: torch.dtype
) -> Tensor:
    """Gather values of whole sequences [b, s x context size] on every rank.

    ``own`` [b, s] are this rank's values; None before the last pipeline stage.
    """
    rows, length = batch.tokens.shape
    whole = torch.empty(
        rows, length * parallel_state.context_size, dtype=dtype, device=parallel_state.device
    )
    if own is not None:
        parts = [torch.empty_like(own) for _ in range(parallel_state.context_size)]
        distributed.all_gather(parts, own.contiguous(), group=parallel_state.context_group)
        by_rank = torch.cat(parts, dim=1).T
        whole = to_sequence_order(by_rank, parallel_state.context_size).T.contiguous()
    if parallel_state.pipeline_size > 1:
        group = parallel_state.pipeline_group
        last = distributed.get_global_rank(group, parallel_state.pipeline_size - 1)
        distributed.broadcast(whole, last, group=group)
    # Results of data-parallel ranks may differ in the last bit. Use the results of one rank, so
    # that all ranks make the same decisions.
    group = parallel_state.data_context_group
    distributed.broadcast(whole, distributed.get_global_rank(group, 0), group=group)
    return whole


def summed_loss(
    network: Callable[..., Tensor], batch: Batch, observe: BatchObserver | None = None
) -> Tensor:
    """Return the loss, [terms], summed over the counted tokens of this rank in a microbatch."""
    return _masked_sum(batch, _output(network, batch, has_labels=True), observe)


def _output(network: Callable[..., Tensor], batch: Batch, *, has_labels: bool) -> Tensor:
    """Return the loss of each token [terms, b, s] if ``has_labels``, else the logits [b, s, v].

    Pipeline stages before the last return hidden states.
    """
    return network(
        batch.tokens,
        labels=batch.labels if has_labels else None,
        packed_seq_params=_packed_documents(batch),
    )


def _packed_documents(batch: Batch) -> PackedSeqParams | None:
    """Return the document boundaries in Megatron's format; None if attention crosses documents."""
    if batch.cu_seqlens is None:
        return None
    return PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=batch.cu_seqlens)


def _masked_sum(batch: Batch, losses: Tensor, observe: BatchObserver | None) -> Tensor:
    if observe is not None:
        cross_entropy = losses if losses.dim() == 2 else losses[0]
        observe(batch, cross_entropy.detach())
    return torch.sum(losses.float() * batch.loss_mask, dim=(-2, -1))


def _count(microbatches: Sequence[Batch], parallel_state: ParallelState) -> Tensor:
    """Return the number of counted tokens in the global batch, 0-dim float32."""
    count = torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum()
    distributed.all_reduce(count, group=parallel_state.data_context_group)
    return count


def _pipeline(
    network: Network,
    microbatches: Sequence[Batch],
    parallel_state: ParallelState,
    weight: Tensor | None,
    forward_context: Callable[[], AbstractContextManager[object]],
    observe: BatchObserver | None = None,
) -> list[Tensor]:
    """Run Megatron's pipeline schedule; return the summed loss of each microbatch, [terms].

    The result is empty before the last pipeline stage. ``network`` needs Megatron's ``config``, so
    DeepSpeed's engine cannot be passed. ``weight`` scales the losses of the backward pass, but not
    the result. None skips the backward pass.
    """
    # The schedule divides each loss by the number of microbatches and multiplies it by the
    # context-parallel size. This factor cancels both.
    factor = len(microbatches) / parallel_state.context_size
    scale = None if weight is None else weight * factor

    def step(microbatches, stage):  # type: ignore[no-untyped-def]
        batch = next(microbatches)
        with forward_context():
            losses = _output(stage, batch, has_labels=True)
        return losses, partial(scheduled_loss, batch)

    def scheduled_loss(batch: Batch, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = _masked_sum(batch, losses, observe)
        # The schedule divides the returned loss in place. The sum is a new tensor.
        whole = loss.sum()
        return whole if scale is None else whole * scale, {"loss": loss.detach()}

    outputs = _scheduled(network, microbatches, parallel_state, step, forward_only=weight is None)
    return [output["loss"] for output in outputs]


def _scheduled(
    network: Network,
    microbatches: Sequence[Batch],
    parallel_state: ParallelState,
    step: Callable[..., object],
    *,
    forward_only: bool,
) -> list[dict[str, Tensor]]:
    """Run Megatron's pipeline schedule; return a dict per microbatch (none before the last stage).

    ``step`` is Megatron's ``forward_step_func``. It returns the stage's output, and a function from
    the output of the last stage to a loss and the dict.
    """
    batch, stages = microbatches[0], list(network.virtual_stages)
    iterators = [iter(microbatches) for _ in stages]
    is_interleaved = len(stages) > 1
    outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if is_interleaved else iterators[0],
        model=stages if is_interleaved else stages[0],
        num_microbatches=len(microbatches),
        # The schedule divides this length by the context-parallel size.
        seq_length=batch.tokens.shape[1] * parallel_state.context_size,
        micro_batch_size=batch.tokens.shape[0],
        forward_only=forward_only,
    )
    return outputs


def _sum_over_ranks(
    losses: Sequence[Tensor], parallel_state: ParallelState
) -> tuple[Tensor, Tensor]:
    """Sum ``losses`` [terms] over the data, context and pipeline ranks.

    ``losses`` is empty before the last pipeline stage. Returns the sums of cross-entropy and
    z-loss, 0-dim float32; without a z-loss, its sum is 0.
    """
    total = torch.zeros(2, dtype=torch.float32, device=parallel_state.device)
    if losses:
        own = torch.stack(list(losses)).view(len(losses), -1).sum(0)
        total[: len(own)] += own
    distributed.all_reduce(total, group=parallel_state.data_context_group)
    if parallel_state.pipeline_size > 1:
        distributed.all_reduce(total, group=parallel_state.pipeline_group)
    return total[0], total[1]


def offloaded_activations(network: torch.nn.Module) -> AbstractContextManager[object]:
    """Return a context in which autograd keeps tensors saved for backward in host memory.

    Weights stay on the device. Torch's ``save_on_cpu`` would copy the weights too, for every
    microbatch.
    """
    pin = torch.cuda.is_available()
    weights = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def pack(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if saved.untyped_storage().data_ptr() in weights:
            return saved
        host = torch.empty_like(saved, device="cpu", pin_memory=pin)
        return saved.device, host.copy_(saved, non_blocking=pin)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=pin)

    return saved_tensors_hooks(pack, unpack)
