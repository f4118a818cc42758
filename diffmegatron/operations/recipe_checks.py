"""Checks of a recipe before its launch: cluster, data and initial checkpoint."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.checkpoint.stage_folders import newest_checkpoint
from diffmegatron.config.schema import Recipe
from diffmegatron.data.index.corpus_manifest import check_sizes, manifest_path, read_corpus_manifest
from diffmegatron.errors import UserError
from diffmegatron.files import format_path, shorten
from diffmegatron.operations.cluster import Cluster

# Up to four epochs are almost as good as new text (Muennighoff et al., 2023, arXiv 2305.16264).
_USUAL_PASSES = 4


def check_fit(
    recipes: Sequence[Recipe], nodes: int, cluster: Cluster, *, needs_data: bool = True
) -> None:
    """Check ranks, amount of data, and the existence of the container image.

    Unless ``needs_data``, sources that are not prepared are not checked.
    """
    for recipe in recipes:
        try:
            recipe.num_microbatches(nodes * cluster.ranks)
        except UserError as error:
            raise UserError(
                f"--nodes {nodes} means {nodes * cluster.ranks} ranks on this cluster: {error}"
            ) from None
        for source in recipe.data.sources:
            if needs_data or _is_prepared(source.path):
                check_sizes(source.path, read_corpus_manifest(source.path))
        for path, passes in _passes(recipe).items():
            # A run with a checkpoint may have begun with other source weights, so do not check it.
            if recipe.data.on_exhausted == "stop" and passes > 1 and not _has_begun(recipe):
                raise UserError(
                    f"{recipe.run_dir} reads source {path} {passes:,.1f} times, and "
                    "data.on_exhausted is 'stop'; lower its weight, add data, train fewer steps, "
                    "or set it to 'repeat'"
                )
    container = cluster.container
    if container is not None and container.is_file and not Path(container.image).exists():
        raise UserError(f"container image {shorten(container.image)} is missing; build it first")


def check_time_limit(recipes: Sequence[Recipe], cluster: Cluster) -> None:
    """Check that a job of the cluster has time left before it must save and stop."""
    for recipe in recipes:
        margin = recipe.checkpoint.time_limit_margin
        if margin >= cluster.seconds:
            raise UserError(
                f"checkpoint.time_limit_margin {margin:g} is not below the {cluster.seconds} s of "
                f"time_limit {cluster.time_limit}, so no job would train a step; lower the margin, "
                "or raise time_limit in the cluster file"
            )


def check_starts(recipes: Sequence[Recipe]) -> None:
    """Check that every ``checkpoint.start_from`` contains a checkpoint.

    Stages that start from another stage, and runs that already have a checkpoint, are not checked.
    """
    own = {recipe.run_dir for recipe in recipes}
    for recipe in recipes:
        start = recipe.checkpoint.start_from
        if start is None or start in own or _has_begun(recipe):
            continue
        try:
            if newest_checkpoint(Path(start)) is None:
                read_checkpoint_manifest(Path(start))  # start_from may be a checkpoint itself.
        except UserError as error:
            raise UserError(
                f"checkpoint.start_from {format_path(Path(start))} holds no checkpoint: {error}"
            ) from None


def data_remarks(recipe: Recipe) -> Iterator[str]:
    """Yield a warning for each source that is not prepared or is used for over four epochs."""
    for source in recipe.data.sources:
        if not _is_prepared(source.path):
            yield f"source {format_path(Path(source.path))} is not prepared; the run would fail"
    for path, passes in _passes(recipe).items():
        if passes > _USUAL_PASSES:
            yield (
                f"{recipe.run_dir} reads source {path} about {passes:,.0f} times; give it more "
                "data or a lower weight, or train fewer steps"
            )


def _is_prepared(prefix: str) -> bool:
    return os.path.lexists(manifest_path(prefix))


def _has_begun(recipe: Recipe) -> bool:
    return bool(CheckpointStore(Path(recipe.run_dir)).steps())


def _passes(recipe: Recipe) -> dict[str, float]:
    """Return a dict: path of each data source -> lower bound on the number of epochs over it.

    Held-out documents, packing and length up-sampling raise the true number. Sources that are not
    prepared are left out. With several sources and global up-sampling, the dict is empty.
    """
    weights = {source.path: source.weight for source in recipe.data.sources}
    if recipe.data.upsampling.mode == "global" and len(weights) > 1:
        return {}
    needed = recipe.training.total_steps * recipe.training.tokens_per_step
    total = sum(weights.values())
    return {
        path: needed * weight / total / read_corpus_manifest(path).tokens
        for path, weight in weights.items()
        if _is_prepared(path)
    }
