"""The loss of a network on the next token: cross-entropy, in chunks of the sequence."""

import importlib.util

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class LanguageModel(GPTModel):
    """Megatron-core's GPTModel with our loss.

    The loss is computed from ``loss_chunk`` positions at a time, whose logits the backward pass
    computes again: all logits of 65,536 positions over 100,288 words would be 26 GB in float32.
    Megatron-core's own fused linear cross-entropy (``cross_entropy_fusion_impl="linear"``) runs on
    Blackwell alone, and Liger's knows no vocabulary-parallel output layer.

    Args:
        loss_chunk: positions of a chunk; None: all at once.
        vocab_padding: rows at the end of the output layer that stand for no token.
    """

    def __init__(
        self, *args: object, loss_chunk: int | None, vocab_padding: int, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        self.loss_chunk, self.vocab_padding = loss_chunk, vocab_padding

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
        group, share = self.pg_collection.tp, logits.shape[-1]
        used = self.vocab_size - self.vocab_padding - group.rank() * share
        used = min(max(used, 0), share)
        if _has_kernel(logits):
            from diffmegatron.model.cross_entropy_kernel import cross_entropy

            losses = cross_entropy(logits.flatten(0, 1), labels.T.flatten(), group, used)
            return losses.view(logits.shape[:2]).T.contiguous()
        if used < share:
            # In place, as nothing before it needs the logits: they are the largest tensor.
            logits[..., used:] = -torch.inf
        return super().compute_language_model_loss(labels, logits)


def _has_kernel(logits: Tensor) -> bool:
    """Whether Triton's cross-entropy can run where the logits are; else it is Megatron-core's."""
    return logits.is_cuda and importlib.util.find_spec("triton") is not None
