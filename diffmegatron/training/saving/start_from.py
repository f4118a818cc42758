"""Start of a new run with the weights of another run (``checkpoint.start_from``).

For example, the second stage of a recipe starts with the weights of the first stage.
"""

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
    """Open the checkpoint of ``checkpoint.start_from``. All ranks must call this function.

    ``checkpoint.start_from`` is one of three paths:

    1. The directory of a checkpoint: this checkpoint is opened.
    2. The ``run_dir`` of a run: its newest intact checkpoint is opened.
    3. The ``run_dir`` of a recipe with stages: the newest intact checkpoint of the last stage that
       has one is opened.

    Returns:
        The checkpoint; None if the recipe does not set ``checkpoint.start_from``.

    Raises:
        UserError: If no checkpoint is intact; if the checkpoint's network or tokenizer does not fit
            the recipe; or if the heads in ``model.attention`` were selected on other weights
            (:func:`_check_made_for`).
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
    """Return the directory of the run or the checkpoint to start from.

    If ``start`` is the ``run_dir`` of a recipe with stages, the result is the folder of the last
    stage that has a checkpoint. In all other cases the result is ``start``.

    Raises:
        UserError: If ``start`` is a ``run_dir`` without checkpoints, or if it has several last
            stages, that is, stages from which no other stage started.
    """
    return last_stage(start).run_dir if is_run_dir(start) else start


def _check_made_for(source: Checkpoint, attention: Variant) -> None:
    """Check that the heads in ``model.attention`` were selected on the weights of ``source``.

    Only the attention kind DEX has such heads: it makes selected heads of a pretrained model
    differential. ``attention.fingerprint`` is a hash of the weights on which the heads were
    selected. Nothing is checked in two cases:

    - ``attention`` has no fingerprint.
    - The checkpoint has the same kind of attention. Training since the selection may have changed
      its weights, and so their hash.

    Raises:
        UserError: If the fingerprint differs from the hash of the checkpoint's weights.
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

    Two kinds of parameters keep their initial values: those that the recipe's attention variant
    declares but the checkpoint's variant does not, and LoRA matrices if the checkpoint has no LoRA.
    """

    def is_new(name: str) -> bool:
        if is_lora(name):
            return source.recipe.model.lora is None
        was, now = (declared_parameter(name, each.model) for each in (source.recipe, recipe))
        return now is not None and was is None

    read_fragments(source.tensors, (WEIGHT,), engine, shards, is_new)
    engine.restore(updates=0)
