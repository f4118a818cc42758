"""The kernels of a run, which rank 0 chooses for all ranks."""

from diffmegatron.attention.kernels.installed_backends import chip_of, importable_libraries
from diffmegatron.config.kernel_choice import Choice, Surroundings, choose_kernels
from diffmegatron.config.schema import Recipe
from diffmegatron.measurements.cache import measurements_here
from diffmegatron.parallel.parallel_state import ParallelState, from_rank_0
from diffmegatron.training.monitoring.progress import print_line


def with_chosen_kernels(
    recipe: Recipe, saved: Recipe | None, parallel_state: ParallelState
) -> Recipe:
    """Return the recipe with ``training.chosen_kernels``; all ranks must call this.

    ``saved`` is the recipe of the checkpoint from which the run resumes, or None.
    """
    device = parallel_state.device.type

    def choose() -> Choice:
        is_auto = recipe.training.attention_backend == "auto"
        measured = measurements_here(device) if is_auto else None
        chip = chip_of(parallel_state.device)
        here = Surroundings(device, importable_libraries(), measured, saved, chip)
        return choose_kernels(recipe, here)

    kernels, lines = from_rank_0(choose)
    for line in lines if parallel_state.is_main else ():
        print_line(line)
    training = recipe.training.model_copy(update={"chosen_kernels": kernels})
    return recipe.model_copy(update={"training": training})
