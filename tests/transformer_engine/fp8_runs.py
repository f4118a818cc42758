"""Training runs in FP8, in one process with Transformer Engine's layers."""

import shutil
from pathlib import Path
from typing import Any

from diffmegatron.config.load import load_recipe
from diffmegatron.errors import UserError
from diffmegatron.model.layers.fp8 import begin_fp8
from diffmegatron.training.trainer import train

LAYERS = 2
# Every dimension of a product is a multiple of 128, as recipe "blockwise" needs.
SIZES = (
    "model.hidden_size=128", "model.ffn_hidden_size=128", f"model.num_layers={LAYERS}",
    "training.precision=bf16", "training.seq_length=128", "training.global_batch_size=1",
    "training.micro_batch_size=1", "optimizer.schedule={kind: constant, warmup_steps: 2}",
)  # fmt: skip
# Name of a run that resumes after ten steps -> name of the run that trains them.
RESUMED = {"resumed": "tensorwise", "then bf16": "tensorwise", "then fp8": "bf16"}
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")


def in_fp8(recipe: str, **keys: int) -> str:
    """Return the override of a recipe of FP8."""
    return f"training.fp8={ {'recipe': recipe, **keys} }"


# Overrides of a network whose saved bytes are compared with plan.
KEPT = ("training.precision=bf16", in_fp8("tensorwise"))


def recompute(layers: int) -> str:
    """Return the override that recomputes groups of layers."""
    return f"recompute={{granularity: full, layers: {layers}}}"


def run_all(file: Path, out: Path) -> dict[str, Any]:
    """Train in bf16 and in FP8, each into a folder of ``out``.

    Returns:
        ``fp8_refusal``: the error of a GPU that lacks the products of a recipe;
        ``scaled_modules``: number of modules with which delayed scaling reduces after the last run.
    """

    def run(name: str, *overrides: str) -> None:
        train(load_recipe(file, [*SIZES, *overrides, f"run_dir={out}/{name}"]))

    run("bf16")
    for recipe in RECIPES:
        run(recipe, in_fp8(recipe))
    for name, first in RESUMED.items():
        saved = "checkpoints/step_00000010"
        shutil.copytree(out / first / saved, out / name / saved)
    for name in ("resumed", "then fp8"):
        run(name, in_fp8("tensorwise"))
    some = in_fp8("tensorwise", first_layers_bf16=1, last_layers_bf16=1)
    deep = ("model.num_layers=3", "training.global_batch_size=2", "training.steps=3")
    run("some", some, recompute(1), *deep)
    for recipe in ("tensorwise", "delayed"):
        run(f"{recipe}, recomputed", in_fp8(recipe), recompute(LAYERS), "training.steps=3")
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    buffers = FP8GlobalStateManager.quantization_state.global_scale_buffer
    forward = [scales for key, scales in buffers.items() if key.startswith("forward")]
    return {"fp8_refusal": _refusal(), "scaled_modules": sum(map(len, forward))}


def _refusal() -> str:
    from transformer_engine.pytorch import quantization

    quantization._MXFP8_SUPPORT = (False, "Device compute capability 10.0 or higher required.")
    try:
        begin_fp8("mxfp8")
    except UserError as error:
        return str(error)
    return ""
