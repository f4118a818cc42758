"""Megatron-core's parallel linear layers with a low-rank term: W x + (alpha / rank) B A x.

The term is LoRA (Hu et al., 2021, arXiv 2106.09685) without its dropout. W is [out, in], A is
[rank, in], and B is [out, rank]. ``model.lora`` of a recipe has ``rank`` and ``alpha``. In shapes s
is the number of positions on this context-parallel rank, and b the number of sequences.
"""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear

from diffmegatron.config.model_config import LoraConfig


class LoraColumnParallelLinear(ColumnParallelLinear):
    """LoRA for ``linear_qkv`` and ``linear_fc1``.

    Each tensor-parallel rank has some rows of B, and the whole A. With ``gated``, W consists of the
    two projections of SwiGLU, and each rank has rows of both projections.
    """

    def __init__(
        self, *args: object, lora: LoraConfig, gated: bool = False, **kwargs: object
    ) -> None:
        super().__init__(*args, **kwargs)
        self.scale, self.gated = lora.scale, gated
        dtype = self.config.params_dtype
        self.lora_a = _parameter(lora.rank, self.input_size, dtype)
        self.lora_b = _parameter(self.output_size_per_partition, lora.rank, dtype)
        # Under sequence parallelism, a rank's gradient of A covers only its shard of the sequence.
        # The attribute makes optim/reduction.py sum the gradients of all tensor-parallel ranks.
        self.lora_a.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        """Project [s, b, in] to [s, b, out / tensor-parallel ranks].

        Under sequence parallelism the input is this tensor-parallel rank's shard of s.
        """
        output, bias = super().forward(input_, *args, **kwargs)
        low = linear(input_, self.lora_a)
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=self.tp_group
            )
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return output + linear(self.scale * low, self.lora_b), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return Megatron's sharded state of the layer, with B sharded by rows like W."""
        axes = {"weight": 0, "bias": 0, "lora_b": 0}
        state = _sharded(self, axes, prefix, sharded_offsets, metadata)
        if self.gated:
            name = f"{prefix}lora_b"
            state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state


class LoraRowParallelLinear(RowParallelLinear):
    """LoRA for ``linear_proj`` and ``linear_fc2``.

    Each tensor-parallel rank has some columns of A, and the whole B.
    """

    def __init__(self, *args: object, lora: LoraConfig, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.scale = lora.scale
        dtype = self.config.params_dtype
        self.lora_a = _parameter(lora.rank, self.input_size_per_partition, dtype)
        self.lora_b = _parameter(self.output_size, lora.rank, dtype)
        self.lora_b.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Project [s, b, in / tensor-parallel ranks] to [s, b, out].

        Under sequence parallelism the output is this tensor-parallel rank's shard of s.
        """
        output, bias = super().forward(input_)
        low = linear(input_, self.lora_a)
        if self.sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.tp_group)
        else:
            low = reduce_from_tensor_model_parallel_region(low, group=self.tp_group)
        return output + linear(self.scale * low, self.lora_b), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        """Return Megatron's sharded state of the layer, with A sharded by columns like W."""
        return _sharded(self, {"weight": 1, "lora_a": 1}, prefix, sharded_offsets, metadata)


def _parameter(rows: int, columns: int, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype))


def _sharded(
    module: ColumnParallelLinear | RowParallelLinear,
    axes: dict[str, int],
    prefix: str,
    sharded_offsets: tuple,
    metadata: dict | None,
) -> dict:
    assert metadata is not None
    return make_sharded_tensors_for_checkpoint(
        module.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        sharded_offsets,
        tp_group=module.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )
