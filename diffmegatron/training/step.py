"""One step of training or evaluation over this rank's microbatches."""

from collections.abc import Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, distributed

from diffmegatron.data.loader import Batch
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.topology import Topology


def forward_backward(
    engine: ZeroEngine, microbatches: Sequence[Batch], topology: Topology
) -> Tensor:
    """Accumulate the gradients of a step.

    Returns:
        0-dim float32: mean loss of the global batch, the same on every rank.
    """
    if topology.pipeline_size > 1:
        losses = _pipeline(engine.network, microbatches, forward_only=False)
        return _mean_over_ranks(losses, topology)
    losses = []
    for batch in microbatches:
        loss = microbatch_loss(engine.network, batch)
        engine.backward(loss / len(microbatches))
        losses.append(loss.detach())
    return _mean_over_ranks(losses, topology)


@torch.no_grad()
def forward_only(network: GPTModel, microbatches: Sequence[Batch], topology: Topology) -> Tensor:
    """Mean loss of a global batch without gradients; 0-dim float32, the same on every rank."""
    if topology.pipeline_size > 1:
        losses = _pipeline(network, microbatches, forward_only=True)
    else:
        losses = [microbatch_loss(network, batch) for batch in microbatches]
    return _mean_over_ranks(losses, topology)


def microbatch_loss(network: GPTModel, batch: Batch) -> Tensor:
    """Mean loss of the tokens that count; 0-dim float32."""
    return _masked_mean(batch.loss_mask, _token_losses(network, batch))


def _token_losses(network: GPTModel, batch: Batch) -> Tensor:
    """Loss of each token, [b, s]; the ends of documents stand in the place of Megatron's mask."""
    documents = None if batch.document_ids is None else batch.cu_seqlens
    return network(batch.tokens, batch.position_ids, documents, labels=batch.labels)


def _masked_mean(mask: Tensor, losses: Tensor) -> Tensor:
    return torch.sum(losses.float() * mask) / mask.sum()


def _pipeline(
    network: GPTModel, microbatches: Sequence[Batch], *, forward_only: bool
) -> list[Tensor]:
    """Megatron's 1F1B schedule; losses on the last stage, nothing on the others.

    It is given the network, never DeepSpeed's engine, whose ``config`` is another thing.
    """
    batch = microbatches[0]
    outputs = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter(microbatches),
        model=network,
        num_microbatches=len(microbatches),
        seq_length=batch.tokens.shape[1],
        micro_batch_size=batch.tokens.shape[0],
        forward_only=forward_only,
    )
    return [output["loss"] for output in outputs]


def _forward_step(microbatches, network: GPTModel):  # type: ignore[no-untyped-def]
    batch: Batch = next(microbatches)
    losses = _token_losses(network, batch)
    return losses, partial(_loss_for_schedule, batch.loss_mask)


def _loss_for_schedule(mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = _masked_mean(mask, losses)
    # The schedule divides the loss it is given in place.
    return loss, {"loss": loss.detach().clone()}


def _mean_over_ranks(losses: Sequence[Tensor], topology: Topology) -> Tensor:
    """Mean over microbatches and data-parallel ranks; only the last stage has losses."""
    if losses:
        mean = torch.stack(list(losses)).mean()
    else:
        mean = torch.zeros((), dtype=torch.float32, device=topology.device)
    distributed.all_reduce(mean, group=topology.data_group)
    mean /= topology.data_size
    if topology.pipeline_size > 1:
        distributed.all_reduce(mean, group=topology.pipeline_group)
    return mean
