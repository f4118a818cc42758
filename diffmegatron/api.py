"""What the commands do, for Python: the functions that put several packages together.

``from diffmegatron import train`` finds them; docs/python.md shows them with those that stand in
one package. Each imports what it needs when it is called: torch, Megatron and DeepSpeed take
seconds, and a mistake in an argument needs none of them.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from diffmegatron.attempts.ends import RankRecord
from diffmegatron.checkpoint.checkpoint_manifest import read_manifest
from diffmegatron.checkpoint.stage_folders import newest_checkpoint
from diffmegatron.config.schema import Recipe
from diffmegatron.parallel.engine_imports import importing_engines
from diffmegatron.parallel.launcher import read_launch
from diffmegatron.training.hooks.hook import HOOKS, Hook
from diffmegatron.training.monitoring.progress import say

if TYPE_CHECKING:
    from diffmegatron.hf.write_export import Verified
    from diffmegatron.training.monitoring.evaluators import OpenEvaluators


def train(
    recipe: Recipe | Sequence[Recipe],
    hooks: Sequence[Hook] = (),
    *,
    record: RankRecord | None = None,
) -> bool:
    """Run a recipe on the ranks the launcher started, or on this process alone.

    Called in the main thread, as it takes the signals that ask a run to stop while it lasts.

    Args:
        recipe: of :func:`load_recipe`, or the stages of :func:`load_stages` one after the other.
        hooks: what else is done before training, after every step and after training, by these
            and then by those of ``register_hook``; the same ones on every rank.
        record: is told every step; for those who start ranks.

    Returns:
        Whether the run is finished: trained, saved and measured. Otherwise it was asked to stop,
        and has saved: the same call goes on from there.

    Raises:
        UserError: the recipe, the data, the layout or a checkpoint do not fit, the guard stopped
            the run, ``run_dir`` was moved or removed, or the last save failed.
    """
    stages = (recipe,) if isinstance(recipe, Recipe) else tuple(recipe)
    read_launch()
    with importing_engines():
        from diffmegatron.training.training_stages import train_stages

    opener: OpenEvaluators | None = None
    if any(stage.training.evaluate for stage in stages):
        from diffmegatron.evaluation.in_training import open_evaluators as opener
    registered = [hook() for hook in HOOKS]
    return train_stages(stages, record, opener, [*hooks, *registered])


def export(
    checkpoint: str | PathLike[str], out: str | PathLike[str], *, verify: bool = True
) -> "Verified | None":
    """Write a checkpoint as files that Hugging Face transformers loads.

    Args:
        checkpoint: its directory, or a ``run_dir`` for the newest there.
        out: directory to create.
        verify: whether to load what was written and compare logits with the training network's.

    Returns:
        The largest difference of logits, ``absolute`` and ``relative``, with the ``tolerance`` and
        the ``reason`` for it; None without ``verify``.

    Raises:
        UserError: there is no good checkpoint, ``out`` exists, or the logits differ.
    """
    read_launch()
    directory = Path(checkpoint)
    if (newest := newest_checkpoint(directory)) is not None:
        directory = newest
        say(f"exporting {directory}")
    read_manifest(directory)
    with importing_engines():
        from diffmegatron.hf.export_checkpoint import export_checkpoint

    return export_checkpoint(directory, Path(out), verify=verify)


def evaluate(
    targets: Sequence[str | PathLike[str]],
    suites: Sequence[str],
    out: str | PathLike[str],
    *,
    data: Sequence[str] = (),
    haystack: str | PathLike[str] | None = None,
    data_dir: str | PathLike[str] | None = None,
    settings: Sequence[str] = (),
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    batch_tokens: int | None = None,
    engine: Literal["transformers", "vllm"] = "transformers",
) -> Path:
    """Measure models on suites, side by side; called again, it goes on where it was.

    Args:
        targets: Hugging Face folders, checkpoints, or ``run_dir``s; differences are to the first.
        suites: names, as docs/evaluation.md has them.
        out: directory of results and report, made where missing.
        data: held-out text, ``[NAME=]PATH``.
        haystack: text to hide needles in.
        data_dir: folder with the files of published data sets.
        settings: ``SUITE.KEY=VALUE``.
        dtype: of the weights; ``auto`` is that of the files on a GPU, and float32 on a CPU.
        device: ``auto`` is a GPU where there is one.
        batch_tokens: largest number of tokens of a batch of texts; by default it suits the device.
        engine: library that computes; ``vllm`` writes texts of models that it serves.

    Returns:
        The report.

    Raises:
        UserError: a target is no model, a suite cannot be asked of it, data are missing, or ``out``
            holds results of something else.
    """
    read_launch()
    with importing_engines():
        from diffmegatron.evaluation.evaluate import evaluate as run
        from diffmegatron.evaluation.model import Computing

    given = {
        "data": tuple(data) or None,
        "haystack": haystack and Path(haystack),
        "data_dir": data_dir and Path(data_dir),
    }
    options = {name: value for name, value in given.items() if value is not None}
    folders = [Path(target) for target in targets]
    computing = Computing(dtype, device, batch_tokens, engine)
    return run(folders, suites, Path(out), options, settings, computing)
