"""Start of a new run with the weights of another run or stage (``checkpoint.start_from``)."""

from functools import partial
from pathlib import Path

from diffmegatron.attention.variants import Variant
from diffmegatron.checkpoint.checkpoint_format import WEIGHT, Checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.stage_folders import is_run_dir, last_stage
from diffmegatron.config.schema import Recipe
from diffmegatron.config.stage_order import check_can_start_from
from diffmegatron.config.trainable_patterns import is_lora
from diffmegatron.errors import UserError
from diffmegatron.files import format_path
from diffmegatron.model.network import declared_parameter
from diffmegatron.optim.zero import ZeroEngine
from diffmegatron.parallel.parallel_state import ParallelState, from_rank_0
from diffmegatron.training.saving.resume import newest_good, open_together, read_fragments
from diffmegatron.training.saving.snapshot import ParameterShards


def open_start(recipe: Recipe, parallel_state: ParallelState) -> Checkpoint | None:
    """Open the checkpoint of ``checkpoint.start_from``, or return None; all ranks must call this.

    A path of a run gives its newest intact checkpoint. A path of a recipe with stages gives that of
    the last stage with a checkpoint.
    """
    if recipe.checkpoint.start_from is None:
        return None
    path = from_rank_0(partial(_run_dir, Path(recipe.checkpoint.start_from)))
    source = newest_good(CheckpointStore(path), parallel_state) or open_together(
        path, parallel_state
    )
    check_can_start_from(source.recipe, str(source.directory), recipe, "the recipe")
    _check_made_for(source, recipe.model.attention)
    return source


def _run_dir(start: Path) -> Path:
    """Return ``start``, or for the ``run_dir`` of a run the folder of its last stage."""
    return last_stage(start).run_dir if is_run_dir(start) else start


def _check_made_for(source: Checkpoint, attention: Variant) -> None:
    """Check that the heads in ``model.attention`` were selected on the weights of ``source`` (DEX).

    A checkpoint with the same kind of attention is not checked, because training has changed the
    weights since the selection.
    """
    is_foundation = source.recipe.model.attention.kind != attention.kind
    made_for, found = attention.fingerprint, source.fingerprint() if is_foundation else None
    if None not in (made_for, found) and made_for != found:
        raise UserError(
            f"model.attention was made for weights of fingerprint {made_for} and "
            f"{format_path(source.directory)} has {found}; select the heads on the model that the "
            "run starts with"
        )


def load_weights(
    source: Checkpoint, recipe: Recipe, engine: ZeroEngine, shards: ParameterShards
) -> None:
    """Load the weights of a checkpoint, without optimizer state and data position.

    Parameters that the checkpoint's network does not have keep their initial values: those of
    another attention variant, and LoRA matrices.
    """

    def is_new(name: str) -> bool:
        if is_lora(name):
            return source.recipe.model.lora is None
        was, now = (declared_parameter(name, each.model) for each in (source.recipe, recipe))
        return now is not None and was is None

    read_fragments(source.tensors, (WEIGHT,), engine, shards, is_new)
    engine.restore(updates=0)
