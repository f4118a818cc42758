"""Bits that this rank's device computes, which ``preflight`` compares over all ranks."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from diffmegatron.attention.kernels.installed_backends import importable_libraries
from diffmegatron.attention.kernels.registry import OPS, subtraction_backend
from diffmegatron.checkpoint.checkpoint_format import read_recipe
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.attention_backend import (
    attention_shape,
    chosen_kernels,
    chosen_loss,
    loss_shape,
    subtraction_shape,
)
from diffmegatron.config.data_config import DataConfig
from diffmegatron.config.schema import Recipe
from diffmegatron.config.training_config import ChosenKernels
from diffmegatron.data.index.corpus_manifest import with_document_mask
from diffmegatron.errors import UserError
from diffmegatron.measurements.machine import cpu_name
from diffmegatron.measurements.records import KernelShape
from diffmegatron.model.accounting.parameters import counted_kinds
from diffmegatron.model.language_model_loss import loss_kernels
from diffmegatron.parallel.deterministic import deterministic_algorithms
from diffmegatron.parallel.parallel_state import from_rank_0
from diffmegatron.training.kernel_choice import choose_here, with_kernels
from diffmegatron.tuning.trials import draw_trial, same_numbers

# Value of a computation whose repetitions have different bits.
UNSTEADY = -1
_REPETITIONS = 3
# Rows and columns of the compared matrix product, and most tokens of a sequence on a CPU.
_MATRIX = {"cpu": 256, "cuda": 4096}
_CPU_TOKENS = 128

Computation = Callable[[], Sequence[Tensor]]


def device_name(device: torch.device) -> str:
    """Return the name that devices with equal bits share: of the GPU, or of CPU and threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()} with {torch.get_num_threads()} threads"


def computed_bits(recipes: Sequence[Recipe], device: torch.device) -> dict[str, int]:
    """Return the CRC-32 of what the device computes from fixed random numbers, by name.

    The computations are a matrix product, and the output and gradients of each kernel of attention
    and of the loss that the recipes' runs choose, in the shapes of training (on a CPU with shorter
    sequences). The recipes are those that :func:`with_kernels_of_rank_0` returns. Sums have a fixed
    order if the kernel has such a form. Megatron-core's loss needs a tensor-parallel group, of one
    rank.
    """
    found: dict[str, int] = {}
    # On a CPU all sums have a fixed order, and entering this context imports Inductor.
    fixed = deterministic_algorithms(only_warns=True) if device.type == "cuda" else nullcontext()
    with fixed:
        for name, compute in _computations(recipes, device):
            if name not in found:
                checksums = {_checksum(compute()) for _ in range(_REPETITIONS)}
                found[name] = checksums.pop() if len(checksums) == 1 else UNSTEADY
    return found


def _computations(
    recipes: Sequence[Recipe], device: torch.device
) -> Iterator[tuple[str, Computation]]:
    yield "a matrix product", partial(_multiply, device)
    for recipe in recipes:
        calls: list[tuple[str, KernelShape | None, str]] = []
        for kind, _ in counted_kinds(recipe.model):
            kernels = chosen_kernels(recipe, kind, device.type)
            attention = recipe.training.attention_backend if kernels is None else kernels.attention
            subtraction: str = "auto" if kernels is None else kernels.subtraction
            if subtraction == "auto":
                subtraction = subtraction_backend(attention)
            calls.append((OPS[kind.operation], attention_shape(recipe, kind), attention))
            calls.append((OPS["subtraction"], subtraction_shape(recipe, kind), subtraction))
        loss = chosen_loss(recipe, device.type, importable_libraries())
        loss = loss_kernels(device)[0] if loss == "auto" else loss
        calls.append(("the loss", loss_shape(recipe), loss))
        for name, shape, backend in calls:
            if shape is not None:
                small = _shortened(shape) if device.type == "cpu" else shape
                yield f"{name} ({backend})", partial(_compute, small, backend, device)


def with_kernels_of_rank_0(recipes: Sequence[Recipe], device: torch.device) -> list[Recipe]:
    """Return the recipes with the kernels that rank 0 chooses; every rank must call this.

    They also have the mask of documents as rank 0 finds its sources. A run that has a checkpoint
    keeps the kernels of the newest one.
    """

    def choose() -> list[tuple[DataConfig, ChosenKernels | None]]:
        decided = map(with_document_mask, recipes)
        return [(r.data, choose_here(r, _saved_recipe(r), device).kernels) for r in decided]

    return [
        with_kernels(recipe.model_copy(update={"data": data}), kernels)
        for recipe, (data, kernels) in zip(recipes, from_rank_0(choose), strict=True)
    ]


def _saved_recipe(recipe: Recipe) -> Recipe | None:
    """Return the recipe of the newest readable checkpoint in ``run_dir``, or None."""
    store = CheckpointStore(Path(recipe.run_dir))
    for step in reversed(store.complete()):
        with suppress(UserError):  # Training resumes from an earlier checkpoint, too.
            return read_recipe(store.path(step))
    return None


def _multiply(device: torch.device) -> list[Tensor]:
    """Return the product of two random matrices in the dtype of most training runs there."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (2, _MATRIX[device.type], _MATRIX[device.type])
    with same_numbers(device):
        a, b = torch.randn(shape, device=device, dtype=dtype)
    return [a @ b]


def _compute(shape: KernelShape, backend: str, device: torch.device) -> list[Tensor]:
    """Return the output of a kernel, and the gradients of its inputs."""
    trial = draw_trial(shape, device)
    inputs = {name: x.detach().requires_grad_() for name, x in trial.inputs.items()}
    out = trial.call(inputs, backend)
    with same_numbers(device, seed=1):
        direction = torch.randn_like(out)
    return [out, *torch.autograd.grad(out, list(inputs.values()), direction)]


def _shortened(shape: KernelShape) -> KernelShape:
    parts = max(1, max(shape.length, shape.keys) // _CPU_TOKENS)
    sizes = {"length": max(1, shape.length // parts), "keys": shape.keys // parts}
    return shape.model_copy(update=sizes | {"batch": 1})


def _checksum(tensors: Sequence[Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        checksum = zlib.crc32(content.numpy().tobytes(), checksum)
    return checksum
