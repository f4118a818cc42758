"""The network of one pipeline rank: Megatron-core GPTModels, and a loss that comes in chunks."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

from diffmegatron.attention.self_attention import SelfAttention
from diffmegatron.attention.variants.base import Parameter
from diffmegatron.config.rope_config import RopeScaling
from diffmegatron.config.schema import ModelConfig
from diffmegatron.model.rope import scaled_frequencies


class VirtualStage(GPTModel):
    """Consecutive layers of the network, with the embedding or the output layer at its ends.

    Without interleaving it is the whole pipeline stage, without a pipeline the whole network.

    The loss is computed from ``loss_chunk`` positions at a time, whose logits the backward pass
    computes again: all logits of 65,536 positions over 100,288 words would be 26 GB in float32.
    Megatron-core's own fused linear cross-entropy (``cross_entropy_fusion_impl="linear"``) runs on
    Blackwell alone, and Liger's knows no vocabulary-parallel output layer.
    """

    def __init__(
        self,
        *args: object,
        loss_chunk: int | None,
        rope_scaling: RopeScaling | None,
        vocab_padding: int,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.loss_chunk, self.vocab_padding = loss_chunk, vocab_padding
        if rope_scaling is not None:
            rotary = self.rotary_pos_emb
            rotary.inv_freq = scaled_frequencies(rotary.inv_freq, rope_scaling)

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        labels = kwargs["labels"]
        if self.loss_chunk is None or labels is None or not self.post_process:
            return super()._postprocess(hidden_states, *args, **kwargs)
        assert isinstance(labels, Tensor)
        return self._chunked_losses(hidden_states, labels, self.loss_chunk)

    def _chunked_losses(self, hidden: Tensor, labels: Tensor, size: int) -> Tensor:
        """Loss of each token, [b, s], from hidden [s, b, h], or [s / tensor, b, h] when sharded.

        The output layer gathers what sequence-parallel ranks hold of a chunk rank by rank, so a
        chunk's positions, and their labels, are some of each rank's.
        """
        by_rank = labels.unflatten(1, (-1, hidden.shape[0]))
        step = -(-size // by_rank.shape[1])
        losses = [
            checkpoint(
                self._losses,
                hidden[start : start + step],
                by_rank[:, :, start : start + step].flatten(1),
                use_reentrant=False,
                preserve_rng_state=False,
            ).unflatten(1, (by_rank.shape[1], -1))
            for start in range(0, hidden.shape[0], step)
        ]
        return torch.cat(losses, dim=2).flatten(1)

    def _losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        weight = None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        logits, _ = self.output_layer(hidden, weight=weight)
        return self.compute_language_model_loss(labels, logits)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Loss of each token, [b, s], from this rank's share of the logits [s, b, v].

        Rows that pad the vocabulary take no part: a pretrained model has never had them, and at
        logits of zero they would be among its likelier words.
        """
        if self.vocab_padding:
            rank, share = self.pg_collection.tp.rank(), logits.shape[-1]
            first = max(self.vocab_size - self.vocab_padding - rank * share, 0)
            # In place, as nothing before it needs the logits: they are the largest tensor.
            logits[..., first:] = -torch.inf
        return super().compute_language_model_loss(labels, logits)

    def likeliest_tokens(self, logits: Tensor) -> Tensor:
        """Ids int64 [b, s] from this rank's share of the logits [b, s, v], the same on every rank.

        Rows that pad the vocabulary are none; -1 is given where a logit is not finite.
        """
        group, share = self.pg_collection.tp, logits.shape[-1]
        first = group.rank() * share
        used = min(max(self.vocab_size - self.vocab_padding - first, 0), share)
        bad = ~logits[..., :used].isfinite().all(-1)
        padded = torch.arange(share, device=logits.device) >= used
        value, place = logits.float().masked_fill(padded, -torch.inf).max(-1)
        values, ids = (
            _gathered(x, group)
            for x in (value.masked_fill(bad, torch.inf), (place + first).masked_fill(bad, -1))
        )
        return ids.gather(0, values.argmax(0, keepdim=True))[0]


class Network(torch.nn.Module):
    """What one pipeline rank holds: one stage of layers, or several that are interleaved.

    Called, it is its only stage.
    """

    def __init__(self, stages: Sequence[VirtualStage]) -> None:
        super().__init__()
        self.virtual_stages: Sequence[VirtualStage] = torch.nn.ModuleList(  # type: ignore[assignment]
            stages
        )

    def at_step(self, step: int) -> None:
        """Tell the layers how many optimizer steps their weights have behind them."""
        for module in self.modules():
            if isinstance(module, SelfAttention):
                module.step = step

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """``(tokens [b, s], position_ids [b, s], attention_mask, labels=[b, s], ...)``.

        The mask is None: attention is causal, and ends of packed documents are
        ``packed_seq_params`` (:class:`~diffmegatron.attention.self_attention.SelfAttention`).

        Returns:
            The loss of each token, [b, s] float32, or without labels this tensor-parallel rank's
            logits [b, s, v].
        """
        (stage,) = self.virtual_stages
        return stage(*args, **kwargs)


def _gathered(own: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """[ranks, ...] of a group."""
    found = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(found, own.contiguous(), group=group)
    return torch.stack(found)


def declared_parameter(name: str, model: ModelConfig) -> Parameter | None:
    """What the attention's variant says of a tensor, by its name; None: it is not its own."""
    _, found, own = name.rpartition(".self_attention.")
    declared = {each.name: each for each in model.attention.parameters(model.hidden_size)}
    return declared.get(own) if found else None
