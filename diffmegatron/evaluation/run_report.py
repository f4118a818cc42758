"""Report on runs that differ in their attention only: ``report.json`` and ``report.png``."""

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.schema import Recipe
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.errors import UserError
from diffmegatron.evaluation.compare import RecordedRun, curves_of, read_run
from diffmegatron.evaluation.plots import plot_runs
from diffmegatron.hf.export_checkpoint import training_logits
from diffmegatron.hf.modeling import register
from diffmegatron.hf.write_export import MAX_VERIFY_TOKENS, verify_export
from diffmegatron.model.accounting import count_parameters

_PROMPT_TOKENS = 64
_NEW_TOKENS = 96


def write_report(
    out: Path, names: Iterable[str], seconds: dict[str, float], started: float
) -> None:
    """Measure exported runs, and write ``report.json`` and ``report.png`` into ``out``.

    Args:
        names: runs in the folders ``out/NAME``, with their exports in ``out/NAME/hf``.
        seconds: duration of each earlier phase in seconds.
        started: value of ``time.perf_counter`` at the start of the phase that writes the report.
    """
    transformers_logging.disable_progress_bar()
    register()
    recorded = {name: read_run(out / name) for name in names}
    models = {name: _describe(out / name, recorded[name]) for name in recorded}
    titles = {name: str(model["title"]) for name, model in models.items()}
    plot_runs(out / "report.png", {titles[name]: curves_of(recorded[name]) for name in recorded})
    report = {
        "machine": {
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "models": models,
        "seconds": seconds | {"report": round(time.perf_counter() - started, 1)},
    }
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def _describe(run_dir: Path, recorded: RecordedRun) -> dict[str, Any]:
    latest, export = CheckpointStore(run_dir).latest(), run_dir / "hf"
    if latest is None:
        raise UserError(f"{run_dir} has no checkpoint; train the run first")
    checkpoint = open_checkpoint(latest)
    tokens = _held_out(checkpoint.recipe)
    difference = verify_export(export, tokens, training_logits(checkpoint, tokens))
    held_out = [loss for _, loss in recorded.series("valid/loss")]
    speeds = [speed for _, speed in recorded.series("perf/tokens_per_second")]
    return {
        "title": checkpoint.recipe.model.attention.title,
        "attention": checkpoint.recipe.model.attention.model_dump(mode="json"),
        "parameters": count_parameters(checkpoint.recipe.model).total,
        "tokens": checkpoint.state["step"] * checkpoint.recipe.training.tokens_per_step,
        "loss_first": held_out[0],
        "loss_last": held_out[-1],
        "tokens_per_second": round(statistics.median(speeds)),
        "logit_difference": {"absolute": difference.absolute, "relative": difference.relative},
        "continuation": _continue(export, tokens[:, :_PROMPT_TOKENS]),
        "checkpoint": str(latest),
        "export": str(export),
    }


def _held_out(recipe: Recipe) -> torch.Tensor:
    """Return the token ids of the first validation sample, [1, s] with s <= MAX_VERIFY_TOKENS."""
    training = recipe.training
    sample = open_samples(recipe.data, training.seq_length, training.seed, "validation")[0]
    return torch.from_numpy(sample.tokens[: min(training.seq_length, MAX_VERIFY_TOKENS)])[None]


def _continue(export: Path, prompt: torch.Tensor) -> dict[str, str]:
    """Return the text of a prompt, ids [1, s], and a continuation sampled with a fixed seed."""
    model = AutoModelForCausalLM.from_pretrained(export, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(export, local_files_only=True)
    torch.manual_seed(0)
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=_NEW_TOKENS,
        do_sample=True,
        temperature=0.7,
    )[0]
    length = prompt.shape[1]
    return {"prompt": tokenizer.decode(ids[:length]), "text": tokenizer.decode(ids[length:])}
