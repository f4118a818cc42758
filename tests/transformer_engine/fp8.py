"""FP8 products of Transformer Engine on a CPU, without its compiled extension.

Transformer Engine's own modules, contexts and delayed scaling run, with other quantizers:

- ``tensorwise`` has those that Transformer Engine ships in plain torch (``custom_recipes``). They
  store 8 bits, and multiply by ``torch._scaled_mm``.
- For the other recipes, a quantizer rounds a tensor to the values that FP8 with scales can
  represent, and keeps the run's precision (``IdentityQuantizer``). The products are then those of
  FP8 operands with a more precise sum.
"""

import copy
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.transformer_engine import emulates_fp8

# Environment variable with a folder in which each rank records its FP8 contexts.
RECORDS = "TRANSFORMER_ENGINE_RECORDS"
Round = Callable[[Tensor], Tensor]


def emulate() -> None:
    """Replace Transformer Engine's quantizers, and its checks of the GPU's generation.

    Versions without ``IdentityQuantizer`` stay as they are.
    """
    if not emulates_fp8():
        return
    from transformer_engine.pytorch import distributed, quantization
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
        CurrentScalingTensorRef,
    )
    from transformer_engine.pytorch.quantization import get_fp8_torch_dtype
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    class Rounding(IdentityQuantizer):
        """Quantizer that applies ``round`` and keeps the dtype."""

        round: Round

        def copy(self) -> "Rounding":
            return copy.copy(self)

        def _maybe_cast(self, tensor: Tensor) -> Tensor:
            return self.round(tensor.detach().float()).to(tensor.dtype)

    def quantizers(state: Any) -> list[Any]:
        if state.recipe.float8_current_scaling():
            dtype = get_fp8_torch_dtype(state.recipe, state.mode == "forward")
            return [CurrentScalingQuantizerRef(dtype) for _ in range(state.num_quantizers)]
        made = []
        for number in range(state.num_quantizers):
            quantizer = Rounding()
            quantizer.round = rounding(state, number)
            made.append(quantizer)
        return made

    # The class moves its data into the backward pass, but the copy of a weight is used again.
    prepare_for_saving = CurrentScalingTensorRef.prepare_for_saving
    CurrentScalingTensorRef.prepare_for_saving = lambda own: prepare_for_saving(copy.copy(own))
    create = quantization.RecipeState.create

    def on_cpu(recipe: Any, **keywords: Any) -> Any:
        state = create(recipe, device=torch.device("cpu"), **keywords)
        if not recipe.custom():
            state.make_quantizers = partial(quantizers, state)
        return state

    quantization.RecipeState.create = staticmethod(on_cpu)
    for name in ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT"):
        setattr(quantization, name, (True, ""))
    # The extension's update of the scales has an equivalent in plain torch.
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"
    distributed._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def rounding(state: Any, number: int) -> Round:
    """Return the function that rounds tensor ``number`` of a module (input, weight, ...)."""
    from transformer_engine.pytorch.quantization import get_fp8_torch_dtype

    recipe, is_forward = state.recipe, state.mode == "forward"
    dtype = get_fp8_torch_dtype(recipe, is_forward)
    if recipe.delayed():
        return partial(
            round_delayed,
            dtype=dtype,
            scale=state.scale[number],
            amax=state.amax_history[0][number],
        )
    if recipe.mxfp8():
        return partial(round_blocks, dtype=dtype, rows=1, columns=32)
    return partial(
        round_blocks, dtype=dtype, rows=128 if number == 1 and is_forward else 1, columns=128
    )


def round_delayed(x: Tensor, dtype: torch.dtype, scale: Tensor, amax: Tensor) -> Tensor:
    """Round with the scale of earlier steps, and store the largest absolute value in ``amax``."""
    amax.copy_(x.abs().max())
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype).float() / scale


def round_blocks(x: Tensor, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
    """Round [..., k] with a power of 2 as the scale of each block of ``rows`` x ``columns``."""
    flat = x.reshape(-1, x.shape[-1])
    blocks = flat.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    amax = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(amax > 0, torch.finfo(dtype).max / amax, 1.0).log2().floor().exp2()
    return ((blocks * scale).to(dtype).float() / scale).view_as(x)


def record(module: ModuleType) -> None:
    """Make ``diffmegatron.model.layers.fp8`` record its calls, in a file of the folder ``RECORDS``.

    A line is the recipe of a run that begins, or for each context: the class and format of the
    recipe (null for bf16), the layer (from 0; -1 for all layers of a pass), and the ranks of the
    group over which delayed scaling reduces.
    """
    if RECORDS not in os.environ:
        return
    get_context, begin = module.get_fp8_context, module.begin_fp8

    def write(entry: object) -> None:
        file = Path(os.environ[RECORDS]) / f"{os.environ.get('RANK', '0')}.jsonl"
        with file.open("a") as lines:
            lines.write(json.dumps(entry) + "\n")

    def begin_fp8(recipe: str) -> None:
        begin(recipe)
        write(recipe)

    def get_fp8_context(config: Any, layer: int = -1) -> Any:
        context = get_context(config, layer)
        recipe, ranks = None, None
        if hasattr(context, "_recipe"):
            ranks = torch.distributed.get_process_group_ranks(context._amax_reduction_group)
            recipe = f"{type(context._recipe).__name__}, {context._recipe.fp8_format.name}"
        write([recipe, layer, ranks])
        return context

    module.begin_fp8, module.get_fp8_context = begin_fp8, get_fp8_context


def read_records(folder: Path, rank: int = 0) -> list[tuple[str, list[list[Any]]]]:
    """Return the recipe and the contexts of each run that a rank has recorded, in order.

    Contexts before the first run are left out.
    """
    runs: list[tuple[str, list[list[Any]]]] = []
    for line in (folder / f"{rank}.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if isinstance(entry, str):
            runs.append((entry, []))
        elif runs:
            runs[-1][1].append(entry)
    return runs
