"""Start of a new run from another run's weights, such as the next stage of a training."""

from pathlib import Path

from torch import distributed

from diffmegatron.attention.variants import Variant
from diffmegatron.checkpoint.checkpoint_format import WEIGHT, Checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.stage_folders import has_run, last_stage
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import check_follows
from diffmegatron.config.trainable_patterns import is_lora
from diffmegatron.errors import UserError
from diffmegatron.files import shown
from diffmegatron.model.network import declared_parameter
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import ParallelState, fail_together
from diffmegatron.training.saving.resume import newest_good, open_together, read_fragments
from diffmegatron.training.saving.snapshot import ParameterShards


def open_start(recipe: Recipe, parallel_state: ParallelState) -> Checkpoint | None:
    """Open the checkpoint whose weights a new run starts with; None if the recipe has none.

    Called on all ranks.

    Raises:
        UserError: If ``checkpoint.start_from`` has no intact checkpoint, or its network or
            tokenizer does not fit the recipe, or its weights are not those that
            ``model.attention`` was made for.
    """
    if recipe.checkpoint.start_from is None:
        return None
    path = _run_dir(Path(recipe.checkpoint.start_from), parallel_state)
    source = newest_good(CheckpointStore(path), parallel_state) or open_together(
        path, parallel_state
    )
    check_follows(source.recipe, str(source.directory), recipe, "the recipe")
    _check_made_for(source, recipe.model.attention)
    return source


def _run_dir(start: Path, parallel_state: ParallelState) -> Path:
    """Return the ``run_dir`` of the last stage if ``start`` holds stages of a recipe, else itself.

    Raises:
        UserError: If there are several last stages.
    """
    found, problem = [start], None
    if parallel_state.is_main:
        try:
            found = [last_stage(start).run_dir if has_run(start) else start]
        except UserError as error:
            problem = str(error)
    fail_together(problem)
    distributed.broadcast_object_list(found, src=0)
    return found[0]


def _check_made_for(source: Checkpoint, attention: Variant) -> None:
    """Refuse attention whose heads were selected on other weights than the source's."""
    is_foundation = source.recipe.model.attention.kind != attention.kind
    made_for, found = attention.fingerprint, source.fingerprint() if is_foundation else None
    if None not in (made_for, found) and made_for != found:
        raise UserError(
            f"model.attention was made for weights of fingerprint {made_for} and "
            f"{shown(source.directory)} has {found}; select the heads on the model that the run "
            "starts with"
        )


def load_weights(
    source: Checkpoint, recipe: Recipe, engine: ZeroEngine, shards: ParameterShards
) -> None:
    """Load weights only; optimizer moments and data start from the beginning.

    Parameters that the checkpoint's kind of attention does not have, and new LoRA matrices, keep
    their initial values.
    """

    def is_new(name: str) -> bool:
        if is_lora(name):
            return source.recipe.model.lora is None
        was, now = (declared_parameter(name, each.model) for each in (source.recipe, recipe))
        return now is not None and was is None

    read_fragments(source.tensors, (WEIGHT,), engine, shards, is_new)
    engine.restore(updates=0)
