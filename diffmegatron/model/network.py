"""The network of a pipeline rank: one stage of layers, or several interleaved virtual stages.

In shapes, b is the number of sequences in a microbatch, s the number of positions on this
context-parallel rank, and v the size of this tensor-parallel rank's vocabulary shard. Under
sequence parallelism, hidden states have s / (tensor-parallel size) positions instead of s.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, distributed

from diffmegatron.attention.kinds.kind import Parameter
from diffmegatron.config.model_config import ModelConfig, RopeScaling
from diffmegatron.config.training_config import LossKernel
from diffmegatron.model.language_model_loss import chunked_losses, cross_entropy
from diffmegatron.model.layers.fp8 import checkpoint, layer_context, pass_context
from diffmegatron.model.layers.rotary import rotary_angles
from diffmegatron.model.layers.self_attention import SelfAttention


class VirtualStage(LanguageModule):
    """Consecutive layers of the network on one pipeline rank.

    The network's first virtual stage also has the embedding. The network's last virtual stage also
    has the final norm and the output layer. Without interleaving, a pipeline stage is one virtual
    stage. Megatron-core's schedules read some attributes of this class
    (tests/unit/model/test_megatron_attributes.py).

    Args:
        vocab_size: number of rows of the unsharded embedding and output layer, with padding.
        vocab_padding: number of padding rows at the end, which are not tokens.
        loss_chunk: number of positions, in each of the b sequences, whose logits are in memory at
            the same time; None for all.
        z_loss: coefficient of the z-loss in training mode; 0 for none.
        loss_kernel: kernel of the loss.
        pre_process, post_process: whether this is the network's first or last virtual stage.
        vp_stage: index of the virtual stage on this rank; None without interleaving.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_specs: Sequence[ModuleSpec],
        final_norm: type,
        *,
        vocab_size: int,
        vocab_padding: int = 0,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        loss_chunk: int | None = None,
        z_loss: float = 0.0,
        loss_kernel: LossKernel = "auto",
        tied_embeddings: bool = False,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        self.model_type, self.vp_stage = ModelType.encoder_or_decoder, vp_stage
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = tied_embeddings
        self.loss_chunk, self.z_loss, self.loss_kernel = loss_chunk, z_loss, loss_kernel
        shard_size = vocab_size // self.tp_group.size()
        tokens = vocab_size - vocab_padding - self.tp_group.rank() * shard_size
        # Number of ids in this rank's vocabulary shard that are not padding.
        self.unpadded_size = min(max(tokens, 0), shard_size)
        self._angles = cache(
            partial(
                rotary_angles,
                width=config.kv_channels,
                theta=rope_theta,
                scaling=rope_scaling,
                group=self.cp_group,
            )
        )
        self._received: Tensor | None = None
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config,
                vocab_size,
                max_sequence_length=0,  # Only learned position embeddings use it.
                position_embedding_type="rope",
                tp_group=self.tp_group,
            )
        self.decoder = Decoder(
            config, layer_specs, final_norm if post_process else None, self.pg_collection, vp_stage
        )
        if post_process:
            self.output_layer = OutputLayer(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                gather_output=False,
                skip_weight_param_allocation=pre_process and tied_embeddings,
                tp_group=self.tp_group,
            )

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        """Set the previous stage's hidden states, the only entry of the list ``received``.

        Megatron's schedules call this method. The entry is [s, b, hidden size], or None in the
        network's first virtual stage.
        """
        (self._received,) = received

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Run the virtual stage.

        Args:
            tokens: ids [b, s].
            position_ids, attention_mask: arguments of Megatron's models, without effect here.
                Rotary embeddings depend on the order of the tokens, and attention is causal.
            labels: ids [b, s], or None.
            packed_seq_params: boundaries of packed documents; None if attention crosses documents.

        Returns:
            In the network's last virtual stage, the loss of each token, float32 [b, s]. With a
            z-loss and in training mode, [2, b, s]: the cross-entropy and the z-loss. In the other
            virtual stages, hidden states [s, b, hidden size]. If ``labels`` is None, the last
            virtual stage returns the logits [b, s, v] of this rank's vocabulary shard.
        """
        hidden = self.embedding(tokens, None) if self.pre_process else self._received
        assert hidden is not None
        length = tokens.shape[1] * self.cp_group.size()
        angles = self._angles(length, device=hidden.device)
        hidden = self.decoder(hidden, angles, packed_seq_params)
        if not self.post_process:
            return hidden
        if labels is None:
            return self._logits(hidden).transpose(0, 1).contiguous()
        z_loss = self.z_loss if self.training else 0.0
        if self.loss_chunk is None:
            return cross_entropy(
                labels,
                self._logits(hidden),
                self.tp_group,
                self.unpadded_size,
                z_loss,
                self.loss_kernel,
            )
        losses: Tensor = self.output_layer(
            hidden,
            self._output_weight(),
            partial(
                chunked_losses,
                labels,
                size=self.loss_chunk,
                group=self.tp_group,
                sequence_parallel=self.config.sequence_parallel,
                unpadded_size=self.unpadded_size,
                z_loss=z_loss,
                kernel=self.loss_kernel,
            ),
        )
        return losses

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return this tensor-parallel rank's shard of the logits, [s, b, v]."""
        logits: Tensor = self.output_layer(hidden, self._output_weight())[0]
        return logits

    def _output_weight(self) -> Tensor | None:
        """Return the embedding's weight if the output layer uses it, otherwise None."""
        shares = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if shares else None

    def likeliest_tokens(self, logits: Tensor) -> Tensor:
        """Return the id of the most likely token at each position, int64 [b, s].

        ``logits`` cover this rank's vocabulary shard, [b, s, v]. The ids are the same on
        every tensor-parallel rank, and exclude vocabulary padding. An id is -1 if a logit of the
        position (except padding) is not finite.
        """
        group, shard_size = self.tp_group, logits.shape[-1]
        first, unpadded_size = group.rank() * shard_size, self.unpadded_size
        bad = ~logits[..., :unpadded_size].isfinite().all(-1)
        padded = torch.arange(shard_size, device=logits.device) >= unpadded_size
        value, place = logits.float().masked_fill(padded, -torch.inf).max(-1)
        values, ids = (
            _gathered(x, group)
            for x in (value.masked_fill(bad, torch.inf), (place + first).masked_fill(bad, -1))
        )
        return ids.gather(0, values.argmax(0, keepdim=True))[0]


class OutputLayer(tensor_parallel.ColumnParallelLinear):
    """Output layer that can compute another function of its input and weight than the product.

    The function must run within the module's call, because ZeRO 3 gathers the weight for this call.
    """

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | None = None,
        function: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Any:
        """Return ``function(hidden, weight)``; without ``function``, Megatron's result.

        ``weight`` None selects the weight of the layer.
        """
        if function is None:
            return super().forward(hidden, weight)
        return function(hidden, self.weight if weight is None else weight)


class Decoder(MegatronModule):
    """The layers of a virtual stage; the network's last virtual stage also has the final norm.

    ``layer_specs`` has one entry per layer. ``final_norm`` is None in the other virtual stages.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_specs: Sequence[ModuleSpec],
        final_norm: type | None,
        groups: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> None:
        super().__init__(config)
        self.tp_group = groups.tp
        # Megatron's layer converts `layer_number` to the layer's number in the network.
        self.layers: Sequence[TransformerLayer] = torch.nn.ModuleList(  # type: ignore[assignment]
            build_module(
                spec, config=config, layer_number=number, pg_collection=groups, vp_stage=vp_stage
            )
            for number, spec in enumerate(layer_specs, start=1)
        )
        self.final_layernorm = None
        if final_norm is not None:
            self.final_layernorm = final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(self, hidden: Tensor, angles: Tensor, documents: PackedSeqParams | None) -> Tensor:
        """Run the layers, and the final norm in the network's last virtual stage.

        ``hidden`` and the result are [s, b, hidden size], or under sequence parallelism
        [s / tensor-parallel size, b, hidden size]. ``angles`` are the rotary angles
        [s, 1, 1, head width] of this context-parallel rank. Without ``documents``, attention
        crosses the boundaries of documents.
        """
        lambdas = _lambdas([layer.self_attention for layer in self.layers])
        with pass_context(self):
            for layers, is_recomputed in self._groups():
                run = partial(_run, layers, angles, documents)
                # Recomputation passes gradients on to tensors only if they are arguments.
                own = [lambdas[layer.self_attention] for layer in layers]
                if is_recomputed and self.training:
                    hidden = checkpoint(self.config, run, hidden, *own)
                else:
                    hidden = run(hidden, *own)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)

    def _groups(self) -> Iterator[tuple[Sequence[TransformerLayer], bool]]:
        """Yield groups of consecutive layers, each with True if the backward pass recomputes it."""
        count, method = self.config.recompute_num_layers, self.config.recompute_method
        if self.config.recompute_granularity != "full":
            yield self.layers, False
        elif method == "uniform":
            for start in range(0, len(self.layers), count):
                yield self.layers[start : start + count], True
        else:
            for number, layer in enumerate(self.layers):
                yield [layer], number < count

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict | None = None,
    ) -> dict:
        """Return Megatron-core's sharded state dict; its keys count the network's layers from 0."""
        state: dict = {}
        for layer in self.layers:
            name = f"{prefix}layers.{layer.layer_number - 1}."
            state |= layer.sharded_state_dict(name, sharded_offsets, metadata)
        if self.final_layernorm is not None:
            state |= sharded_state_dict_default(
                self.final_layernorm,
                f"{prefix}final_layernorm.",
                sharded_offsets,
                metadata,
                tp_group=self.tp_group,
            )
        return state


def _run(
    layers: Sequence[TransformerLayer],
    angles: Tensor,
    documents: PackedSeqParams | None,
    hidden: Tensor,
    *lambdas: Tensor | None,
) -> Tensor:
    for layer, lambda_ in zip(layers, lambdas, strict=True):
        layer.self_attention.lambda_ = lambda_
        with layer_context(layer):
            hidden, _ = layer(
                hidden_states=hidden,
                attention_mask=None,
                rotary_pos_emb=angles,
                packed_seq_params=documents,
            )
        layer.self_attention.lambda_ = None
    return hidden


def _lambdas(layers: Sequence[SelfAttention]) -> dict[SelfAttention, Tensor | None]:
    """Return the lambda of each layer whose kind computes the lambdas of several layers together.

    For other layers, and with ZeRO 3, the value is None: ZeRO 3 gathers a parameter only while the
    module that owns it runs.
    """
    found: dict[SelfAttention, Tensor | None] = dict.fromkeys(layers)
    own_parameters = (each for layer in layers for each in layer.parameters(recurse=False))
    if any(hasattr(parameter, "ds_tensor") for parameter in own_parameters):
        return found
    # The backward pass passes on the gradients in the reverse order, which must be the same on all
    # ranks, because they sum gradients in it. The order of a set differs between processes.
    for kind in dict.fromkeys(type(layer.kind) for layer in layers):
        own = [layer for layer in layers if type(layer.kind) is kind]
        lambdas = kind.current_lambdas([(layer.kind, layer) for layer in own])
        found.update(zip(own, lambdas or (), strict=lambdas is not None))
    return found


class Network(torch.nn.Module):
    """All virtual stages of one pipeline rank."""

    def __init__(self, stages: Sequence[VirtualStage]) -> None:
        super().__init__()
        self.virtual_stages: Sequence[VirtualStage] = torch.nn.ModuleList(  # type: ignore[assignment]
            stages
        )

    def at_step(self, step: int) -> None:
        """Set the number of completed training steps, which some kinds of attention use."""
        for layer in self._attention_layers():
            layer.step = step

    def lambda_by_layer(self) -> dict[int, Tensor]:
        """Return lambda (0-dim) of each differential layer on this rank, by layer number from 1.

        If lambda depends on the token, the value is the mean over the heads and tokens of this rank
        in the last forward pass. Before the first forward pass, such a layer is missing.
        """
        found = {}
        for layer in self._attention_layers():
            value = layer.kind.current_lambda(layer)
            if value is None and "lambda" in layer.observed:
                value = layer.observed["lambda"]()
            if value is not None:
                found[layer.layer_number] = value.detach()
        return found

    def _attention_layers(self) -> Iterator[SelfAttention]:
        return (module for module in self.modules() if isinstance(module, SelfAttention))

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """Run the only virtual stage.

        The arguments are those of :meth:`VirtualStage.forward`. With several virtual stages,
        Megatron's schedules call each of them directly.
        """
        (stage,) = self.virtual_stages
        return stage(*args, **kwargs)


def _gathered(own: Tensor, group: distributed.ProcessGroup) -> Tensor:
    """Gather a tensor from all ranks of a group, and stack the tensors to [ranks, ...]."""
    found = [torch.empty_like(own) for _ in range(group.size())]
    distributed.all_gather(found, own.contiguous(), group=group)
    return torch.stack(found)


def declared_parameter(name: str, model: ModelConfig) -> Parameter | None:
    """Return the declaration of an attention parameter by its full name; None for other tensors."""
    layer, found, own = name.rpartition(".self_attention.")
    if not found:
        return None
    kind = model.attention.of_layer(int(layer.rpartition(".")[2]))
    declared = {each.name: each for each in kind.parameters(model.hidden_size)}
    return declared.get(own)
