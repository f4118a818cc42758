"""The transformer layers of a virtual stage, and the norm after the last layer."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor


class Decoder(MegatronModule):
    """The transformer layers of a virtual stage, from one spec per layer.

    ``final_norm`` is None in all virtual stages except the network's last one.
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
        """Run the layers, and the final norm in the last virtual stage.

        ``hidden`` is [positions, batch, hidden size], under sequence parallelism only this rank's
        positions. ``angles`` are the rotary angles [positions, 1, 1, head width] of this
        context-parallel rank. Without ``documents``, attention crosses the boundaries of documents.
        """
        for layers, is_recomputed in self._groups():
            run = partial(_run, layers, angles, documents)
            if is_recomputed and self.training:
                hidden = tensor_parallel.checkpoint(run, False, hidden)
            else:
                hidden = run(hidden)
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
        """Return Megatron-core's sharded state dict, with each layer's index in the network."""
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
) -> Tensor:
    for layer in layers:
        hidden, _ = layer(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=documents,
        )
    return hidden
