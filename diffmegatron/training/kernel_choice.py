"""The kernels of a run, which rank 0 chooses for all ranks."""

import torch

from diffmegatron.attention.kernels.installed_backends import chip_of, importable_libraries
from diffmegatron.config.kernel_choice import Choice, Surroundings, choose_kernels
from diffmegatron.config.schema import Recipe
from diffmegatron.config.training_config import ChosenKernels
from diffmegatron.measurements.cache import measurements_here
from diffmegatron.parallel.parallel_state import ParallelState, from_rank_0
from diffmegatron.training.monitoring.progress import print_line


def with_chosen_kernels(
    recipe: Recipe, saved: Recipe | None, parallel_state: ParallelState
) -> Recipe:
    """Return the recipe with ``training.chosen_kernels``; all ranks must call this.

    ``saved`` is the recipe of the checkpoint from which the run resumes, or None. Rank 0 prints
    what it chose.
    """
    device = parallel_state.device
    kernels, lines = from_rank_0(lambda: choose_here(recipe, saved, device))
    for line in lines if parallel_state.is_main else ():
        print_line(line)
    return with_kernels(recipe, kernels)


def choose_here(recipe: Recipe, saved: Recipe | None, device: torch.device) -> Choice:
    """Choose the kernels of a run by the measurements and libraries of this machine."""
    is_auto = recipe.training.attention_backend == "auto"
    measured = measurements_here(device.type) if is_auto else None
    libraries = importable_libraries()
    here = Surroundings(device.type, libraries, measured, saved, chip_of(device))
    return choose_kernels(recipe, here)


def with_kernels(recipe: Recipe, kernels: ChosenKernels | None) -> Recipe:
    """Return the recipe with ``training.chosen_kernels``."""
    training = recipe.training.model_copy(update={"chosen_kernels": kernels})
    return recipe.model_copy(update={"training": training})
