"""The network of one pipeline rank: its layers, in one stage or several that are interleaved."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed

from diffmegatron.attention.self_attention import SelfAttention
from diffmegatron.attention.variants.base import Parameter
from diffmegatron.config.model_config import ModelConfig
from diffmegatron.config.rope_config import RopeScaling
from diffmegatron.model.language_model_loss import LanguageModel
from diffmegatron.model.rope import scaled_frequencies


class VirtualStage(LanguageModel):
    """Consecutive layers of the network, with the embedding or the output layer at its ends.

    Without interleaving it is the whole pipeline stage, without a pipeline the whole network.
    """

    def __init__(self, *args: object, rope_scaling: RopeScaling | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if rope_scaling is not None:
            rotary = self.rotary_pos_emb
            rotary.inv_freq = scaled_frequencies(rotary.inv_freq, rope_scaling)

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
