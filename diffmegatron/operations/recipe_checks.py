"""Checks of a recipe against its cluster, its data and its start, before a job is submitted."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from diffmegatron.checkpoint.checkpoint_manifest import read_manifest as read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.stage_folders import newest_checkpoint
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import read_manifest
from diffmegatron.data.index.verify_corpus import check_sizes
from diffmegatron.errors import UserError
from diffmegatron.files import clipped, shown
from diffmegatron.operations.cluster import Cluster

# Up to four passes over the same text are almost as good as new text (Muennighoff et al., 2023,
# arXiv 2305.16264).
_USUAL_PASSES = 4


def check_fit(recipes: Sequence[Recipe], nodes: int, cluster: Cluster) -> None:
    """Refuse ranks that do not fill a layout, data that is not whole, an image that is not there.

    Raises:
        UserError: as it says, or a source is too small for ``data.on_exhausted: stop``.
    """
    for recipe in recipes:
        try:
            recipe.num_microbatches(nodes * cluster.ranks)
        except UserError as error:
            raise UserError(
                f"--nodes {nodes} means {nodes * cluster.ranks} ranks on this cluster: {error}"
            ) from None
        for source in recipe.data.sources:
            check_sizes(source.path, read_manifest(source.path))
        for path, passes in _passes(recipe).items():
            # The mixture of a run that has begun may have been another one until now.
            if recipe.data.on_exhausted == "stop" and passes > 1 and not _has_begun(recipe):
                raise UserError(
                    f"{recipe.run_dir} reads source {path} {passes:,.1f} times, and "
                    "data.on_exhausted is 'stop'; lower its weight, add data, train fewer steps, "
                    "or set it to 'repeat'"
                )
    container = cluster.container
    if container is not None and container.is_file and not Path(container.image).exists():
        raise UserError(f"container image {clipped(container.image)} is not there; build it first")


def check_starts(recipes: Sequence[Recipe]) -> None:
    """Refuse a ``checkpoint.start_from`` in which no checkpoint can be found.

    A stage may start from another one of ``recipes``, and a run that has a checkpoint of its own
    does not read ``start_from`` again.

    Raises:
        UserError: there is none.
    """
    own = {recipe.run_dir for recipe in recipes}
    for recipe in recipes:
        start = recipe.checkpoint.start_from
        if start is None or start in own or _has_begun(recipe):
            continue
        try:
            if newest_checkpoint(Path(start)) is None:
                read_checkpoint_manifest(Path(start))  # of the checkpoint that it may be itself
        except UserError as error:
            raise UserError(
                f"checkpoint.start_from {shown(Path(start))} holds no checkpoint: {error}"
            ) from None


def data_remarks(recipe: Recipe) -> Iterator[str]:
    """Sentences about sources that are read much more often than is usual."""
    for path, passes in _passes(recipe).items():
        if passes > _USUAL_PASSES:
            yield (
                f"{recipe.run_dir} reads source {path} about {passes:,.0f} times; give it more "
                "data or a lower weight, or train fewer steps"
            )


def _has_begun(recipe: Recipe) -> bool:
    return bool(CheckpointStore(Path(recipe.run_dir)).steps())


def _passes(recipe: Recipe) -> dict[str, float]:
    """Return how often a run reads each source, at least: by the tokens of its manifest.

    Held-out documents, packing and length up-sampling leave fewer tokens of a source.
    """
    weights = {source.path: source.weight for source in recipe.data.sources}
    if recipe.data.upsampling.mode == "global" and len(weights) > 1:
        return {}  # the shares depend on how long the documents are
    needed = recipe.training.total_steps * recipe.training.tokens_per_step
    total = sum(weights.values())
    return {
        path: needed * weight / total / read_manifest(path).tokens
        for path, weight in weights.items()
    }
