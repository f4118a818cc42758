"""Public functions that train, export and evaluate from Python; docs/python.md describes them.

Each function runs quick checks before the slow imports of torch, Megatron-core and DeepSpeed.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.checkpoint.checkpoint_manifest import read_checkpoint_manifest
from diffmegatron.checkpoint.stage_folders import newest_checkpoint
from diffmegatron.config.schema import Recipe
from diffmegatron.hf.kinds import NetworkExport
from diffmegatron.parallel.engine_imports import importing_engines
from diffmegatron.parallel.launcher import check_launch
from diffmegatron.training.hook import HOOKS, Hook
from diffmegatron.training.monitoring.progress import print_line

if TYPE_CHECKING:
    from diffmegatron.hf.write_export import Verified
    from diffmegatron.training.monitoring.evaluators import OpenEvaluators


def train(
    recipe: Recipe | Sequence[Recipe],
    hooks: Sequence[Hook] = (),
    *,
    record: RankRecord | None = None,
) -> bool:
    """Train a recipe on the ranks that the launcher started, or in this process alone.

    This function installs signal handlers, so call it in the main thread.

    Args:
        recipe: a recipe, or the recipes of all training stages in order (:func:`load_stages`).
        hooks: hooks of this run. They run before the hooks that were registered with
            ``register_hook``. Every rank must pass the same hooks.
        record: writer of this rank's last step and exit status for launch scripts; None: nothing
            is written.

    Returns:
        True if the run is finished (trained, saved and evaluated). False if a stop signal, the
        job's time limit or a hook stopped the run early. The same call then resumes the run.

    Raises:
        UserError: the recipe, data, layout and checkpoint do not fit together; the guard against
            loss spikes stopped the run; ``run_dir`` was moved or removed; or the last save failed.
    """
    stages = (recipe,) if isinstance(recipe, Recipe) else tuple(recipe)
    check_launch()
    with importing_engines():
        from diffmegatron.training.trainer import train_stages

    opener: OpenEvaluators | None = None
    if any(stage.training.evaluate for stage in stages):
        from diffmegatron.evaluation.in_training import open_evaluators as opener
    registered = [hook() for hook in HOOKS]
    return train_stages(stages, record, opener, [*hooks, *registered])


def export(
    checkpoint: str | PathLike[str],
    out: str | PathLike[str],
    *,
    serving: bool = False,
    verify: bool = True,
) -> "Verified | None":
    """Convert a checkpoint to a folder that Hugging Face transformers can load.

    Args:
        checkpoint: a checkpoint directory, or a ``run_dir`` whose newest checkpoint is exported.
        out: directory to create.
        serving: whether to export ``diff_v1`` as a class with one attention call per layer, which
            serving engines require, instead of ``DiffLlamaForCausalLM``.
        verify: whether to load the written files and compare their logits with the logits of the
            training network.

    Returns:
        None if ``verify`` is false, otherwise a named tuple. It has the largest difference of the
        logits (``absolute``, and ``relative`` to the largest logit), the accepted relative
        difference (``tolerance``), and the ``reason`` for differences.

    Raises:
        UserError: the checkpoint is missing or damaged, its attention has no export, ``out``
            exists, or the logits of the written files differ by more than the tolerance.
    """
    check_launch()
    directory = Path(checkpoint)
    if (newest := newest_checkpoint(directory)) is not None:
        directory = newest
        print_line(f"exporting {directory}")
    read_checkpoint_manifest(directory)
    # This import loads torch, but not Megatron-core and DeepSpeed.
    from diffmegatron.checkpoint.checkpoint_format import read_recipe

    model = read_recipe(directory).model
    NetworkExport(model.attention, model.hidden_size, model.num_layers).check()
    with importing_engines():
        from diffmegatron.hf.export_checkpoint import export_checkpoint

    return export_checkpoint(directory, Path(out), serving=serving, verify=verify)


def evaluate(
    targets: Sequence[str | PathLike[str]],
    suites: Sequence[str],
    out: str | PathLike[str],
    *,
    settings: Sequence[str] = (),
    **options: Any,
) -> Path:
    """Evaluate one or more models on the same suites, and write a report that compares them.

    If ``out`` holds an unfinished evaluation of the same targets, this function resumes it.

    Args:
        targets: models to evaluate: Hugging Face folders, checkpoints, or ``run_dir``s. The report
            shows the differences between the first model and each other model.
        suites: names of evaluation suites, listed in docs/reference/suites.md.
        out: directory of the results and the report; created if it is missing.
        settings: settings of suites that replace the defaults, each as ``SUITE.KEY=VALUE``.
        options: fields of :class:`~diffmegatron.evaluation.evaluate_settings.EvaluateSettings`:
            ``data``, ``haystack``, ``data_dir``, ``dtype``, ``device``, ``batch_tokens`` and
            ``engine``.

    Returns:
        The path of the report.

    Raises:
        UserError: a target is not a model, a suite does not support a target, data is missing, or
            ``out`` holds an evaluation of other targets or with other settings.
    """
    check_launch()
    with importing_engines():
        from diffmegatron.evaluation.evaluate import evaluate as run
        from diffmegatron.evaluation.evaluate_settings import EvaluateSettings

    folders = [Path(target) for target in targets]
    return run(folders, suites, Path(out), EvaluateSettings(**options), settings)
