"""Forward and backward passes of one step over this rank's microbatches."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from diffmegatron.attention.context_parallel.zigzag import to_sequence_order
from diffmegatron.data.loader import Batch
from diffmegatron.model.network import Network, VirtualStage
from diffmegatron.parallel.parallel_state import ParallelState
from diffmegatron.training.compute.offload import offloaded_activations

ForwardContext = Callable[[], AbstractContextManager[object]]
# Receives each microbatch with the losses of its tokens [b, s], on the ranks of the last stage.
Observer = Callable[[Batch, Tensor], None]


class Engine(Protocol):
    """A network that accumulates and reduces gradients; the ZeRO engine is one."""

    network: Network

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Run the forward pass of :class:`~diffmegatron.model.network.Network`."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add to the gradients; ``is_last`` marks the last microbatch of the step."""


def forward_backward(
    engine: Engine,
    microbatches: Sequence[Batch],
    parallel_state: ParallelState,
    *,
    offload_activations: bool = False,
    observe: Observer | None = None,
) -> Tensor:
    """Accumulate the gradients of a step.

    Every counted token has the same weight, whichever microbatch or rank it is on, because packed
    fine-tuning data has microbatches with few counted tokens or none.

    Args:
        engine: network that accumulates the gradients.
        microbatches: this rank's share of its data-parallel rank's microbatches.
        parallel_state: layout, and this rank's place in it.
        offload_activations: whether saved activations are kept in host memory.
        observe: receives the detached losses of the tokens.

    Returns:
        Mean loss of the global batch; 0-dim float32, the same on every rank.
    """
    count = _count(microbatches, parallel_state)
    # DeepSpeed averages over the data x context parallel ranks, and this is a sum over them.
    weight = parallel_state.data_size * parallel_state.context_size / count
    offloaded = partial(offloaded_activations, engine.network, enabled=offload_activations)
    if parallel_state.pipeline_size > 1:
        losses = _pipeline(engine.network, microbatches, parallel_state, weight, offloaded, observe)
    else:
        losses = []
        for number, batch in enumerate(microbatches, 1):
            with offloaded():
                loss = summed_loss(engine, batch, observe)
            engine.backward(loss * weight, is_last=number == len(microbatches))
            losses.append(loss.detach())
    return _mean_over_ranks(losses, count, parallel_state)


@torch.no_grad()
def forward_only(
    network: Network, microbatches: Sequence[Batch], parallel_state: ParallelState
) -> Tensor:
    """Return the mean loss of a global batch without gradients; 0-dim float32 on every rank."""
    if parallel_state.pipeline_size > 1:
        losses = _pipeline(network, microbatches, parallel_state, None, nullcontext)
    else:
        losses = [summed_loss(network, batch) for batch in microbatches]
    return _mean_over_ranks(losses, _count(microbatches, parallel_state), parallel_state)


def token_losses(network: Network, batch: Batch, parallel_state: ParallelState) -> Tensor:
    """Return the loss of every label of whole sequences of which ``batch`` is this rank's share.

    Returns:
        Float32 [b, s], the same on every rank of the model-parallel group.
    """
    return _forward(network, batch, parallel_state, Tensor.float, has_labels=True)


def next_tokens(network: Network, batch: Batch, parallel_state: ParallelState) -> Tensor:
    """Return the most likely token after every position, -1 where a logit is not finite.

    Returns:
        Int64 [b, s] of whole sequences, the same on every rank of the model-parallel group.
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
    """Return ``read`` of the network's output for whole sequences, [b, s]."""
    own: Tensor | None
    if parallel_state.pipeline_size > 1:
        # An interleaved schedule needs a multiple of the number of stages as microbatches.
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
    """Gather whole sequences from the last stage, and broadcast the first replica's to all."""
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
    # Later decisions depend on the result, so it must not differ in the last bit between replicas.
    group = parallel_state.data_group
    distributed.broadcast(whole, distributed.get_global_rank(group, 0), group=group)
    return whole


def summed_loss(
    network: Callable[..., Tensor], batch: Batch, observe: Observer | None = None
) -> Tensor:
    """Return the summed loss of the counted tokens; 0-dim float32."""
    return _masked_sum(batch, _output(network, batch, has_labels=True), observe)


def _output(network: Callable[..., Tensor], batch: Batch, *, has_labels: bool) -> Tensor:
    """Return the loss of each token [b, s], or this tensor-parallel rank's logits [b, s, v].

    A stage before the last returns its hidden states.
    """
    return network(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels if has_labels else None,
        packed_seq_params=_packed_documents(batch),
    )


def _packed_documents(batch: Batch) -> PackedSeqParams | None:
    """Return the ends of documents in the form that Megatron passes to every layer.

    The layout stays ``sbhd``. With the packed layout Megatron would size its rotary embedding by
    the longest document, while ``max_seqlen`` here is the length of a row.
    """
    if batch.document_ids is None:
        return None
    length = int(batch.cu_seqlens[-1]) // batch.tokens.shape[0]
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        max_seqlen_q=length,
        max_seqlen_kv=length,
    )


def _masked_sum(batch: Batch, losses: Tensor, observe: Observer | None) -> Tensor:
    if observe is not None:
        observe(batch, losses.detach())
    return torch.sum(losses.float() * batch.loss_mask)


def _count(microbatches: Sequence[Batch], parallel_state: ParallelState) -> Tensor:
    """Return the number of counted tokens of the global batch, at least 1; 0-dim float32."""
    count = torch.stack([batch.loss_mask.sum() for batch in microbatches]).sum()
    distributed.all_reduce(count, group=parallel_state.data_group)
    return count.clamp(min=1.0)


def _pipeline(
    network: Network,
    microbatches: Sequence[Batch],
    parallel_state: ParallelState,
    weight: Tensor | None,
    forward_context: ForwardContext,
    observe: Observer | None = None,
) -> list[Tensor]:
    """Run Megatron's 1F1B schedule, interleaved if the network has several virtual stages.

    The schedule runs the network itself: it reads ``config``, which on DeepSpeed's engine is
    something else.

    Args:
        network: this rank's virtual stages.
        microbatches: microbatches of this data-parallel rank.
        parallel_state: layout, and this rank's place in it.
        weight: factor of a summed loss in the gradients; None for no backward pass.
        forward_context: context manager around each forward pass.
        observe: receives the detached losses of the tokens.

    Returns:
        Summed losses of the microbatches on the last stage; an empty list on the others.
    """
    # The schedule divides each loss by the number of microbatches, and multiplies it by the
    # context-parallel size because it divides the sequence length by that size.
    factor = len(microbatches) / parallel_state.context_size
    scale = None if weight is None else weight * factor
    step = partial(_forward_step, scale, forward_context, observe)
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
    """Return what ``step`` collects of every microbatch on the last stage; empty on the others."""
    batch, stages = microbatches[0], list(network.virtual_stages)
    iterators = [iter(microbatches) for _ in stages]
    is_interleaved = len(stages) > 1
    outputs: list[dict[str, Tensor]] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if is_interleaved else iterators[0],
        model=stages if is_interleaved else stages[0],
        num_microbatches=len(microbatches),
        seq_length=batch.tokens.shape[1] * parallel_state.context_size,
        micro_batch_size=batch.tokens.shape[0],
        forward_only=forward_only,
    )
    return outputs


def _forward_step(  # type: ignore[no-untyped-def]
    scale: Tensor | None,
    forward_context: ForwardContext,
    observe: Observer | None,
    microbatches,
    stage: VirtualStage,
):
    batch: Batch = next(microbatches)
    with forward_context():
        losses = _output(stage, batch, has_labels=True)
    return losses, partial(_scheduled_loss, batch, scale, observe)


def _scheduled_loss(
    batch: Batch, scale: Tensor | None, observe: Observer | None, losses: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = _masked_sum(batch, losses, observe)
    # The schedule divides its loss in place, so return a copy.
    return loss.clone() if scale is None else loss * scale, {"loss": loss.detach()}


def _mean_over_ranks(
    losses: Sequence[Tensor], count: Tensor, parallel_state: ParallelState
) -> Tensor:
    """Return the mean over all counted tokens of the global batch, from the last stage's losses."""
    total = torch.zeros((), dtype=torch.float32, device=parallel_state.device)
    if losses:
        total += torch.stack(list(losses)).sum()
    distributed.all_reduce(total, group=parallel_state.data_group)
    if parallel_state.pipeline_size > 1:
        distributed.all_reduce(total, group=parallel_state.pipeline_group)
    return total / count
