"""``diffmegatron quickstart``: prepare text, then train, export and compare small models.

Every phase except the report runs as a command that a user can type.
"""

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from diffmegatron.attention.kinds import KINDS
from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.data.sampling.samples import open_samples
from diffmegatron.errors import UserError
from diffmegatron.evaluation.compare import RecordedRun, plot_runs, read_run
from diffmegatron.files import shorten
from diffmegatron.hf.export_checkpoint import training_logits
from diffmegatron.hf.modeling import register
from diffmegatron.hf.write_export import MAX_VERIFY_TOKENS, verify_export
from diffmegatron.model.accounting.parameters import count_parameters
from diffmegatron.operations.recipes import CONFIGS

RUNS = Path("runs/quickstart")
CONFIG = CONFIGS / "quickstart.yaml"
EXCLUDED_FOLDERS = {"site-packages", "__pycache__", "lib-dynload"}
CLI = ["-m", "diffmegatron"]
_PROMPT_TOKENS = 64
_NEW_TOKENS = 96


def quickstart(attention_kinds: Sequence[str], overrides: Sequence[str]) -> None:
    """Run every phase and replace ``runs/quickstart`` in the current directory.

    Args:
        attention_kinds: kinds of attention as ``KIND[,KEY=VALUE...]``, one per model; empty: the
            recipe's kind and its baseline.
        overrides: ``KEY=VALUE`` overrides for the recipe of every run.
    """
    names = check(attention_kinds, overrides)
    if RUNS.exists():
        print(f"removing the previous {RUNS}", flush=True)
        shutil.rmtree(RUNS)
    seconds: dict[str, float] = {}
    corpus = f"{RUNS}/data/stdlib"
    reading = ["--pattern", "*.py", "--tokenizer", "bytes", "--workers", "2", "--output", corpus]
    _run(seconds, "prepare", *CLI, "prepare", *library_sources(), *reading)
    for name, chosen in names.items():
        _run(seconds, f"train {name}", *torchrun(), "train", str(CONFIG), *chosen)
    for name in names:
        _run(seconds, f"export {name}", *CLI, "export", f"{RUNS}/{name}", f"{RUNS}/{name}/hf")
    report = write_report(names, seconds)
    print("\n".join(closing_lines(report["models"].values())))
    print(f"wrote {RUNS}/report.json and {RUNS}/report.png")


def check(attention_kinds: Sequence[str], overrides: Sequence[str]) -> dict[str, list[str]]:
    """Check the recipe of every run, and return a dict: name of each run -> its overrides."""
    if wrong := [each for each in overrides if "=" not in each]:
        raise UserError(f"override {shorten(repr(wrong[0]))} is not of the form section.key=value")
    for choice in attention_kinds:
        kind, *keys = choice.split(",")
        if kind not in KINDS or not all("=" in key for key in keys):
            raise UserError(
                f"--attention {shorten(repr(choice))} is not of the form KIND[,KEY=VALUE...]; KIND "
                f"is one of {', '.join(KINDS)}"
            )
    names = {}
    for choice in attention_kinds or kind_and_baseline():
        name = choice.partition(",")[0]
        names[name] = [
            *with_machine_overrides(overrides),
            *attention(choice),
            f"run_dir={RUNS}/{name}",
        ]
        recipe = load_recipe(CONFIG, names[name])
        recipe.check_ranks(ranks())
        if not recipe.data.validation_fraction or not recipe.training.eval_batches:
            raise UserError(
                "data.validation_fraction or training.eval_batches is 0, and quickstart reports "
                "the held-out loss; give both a value above 0"
            )
    return names


def kind_and_baseline() -> tuple[str, str]:
    """Return the recipe's kind of attention, and the kind of its baseline for comparison."""
    attention = load_recipe(CONFIG).model.attention
    return attention.kind, attention.baseline().kind


def attention(choice: str) -> list[str]:
    """Return the recipe overrides for ``KIND[,KEY=VALUE...]``."""
    kind, *keys = choice.split(",")
    return [f"model.attention.kind={kind}", *(f"model.attention.{key}" for key in keys)]


def library_sources() -> list[str]:
    """Return the paths of the modules and packages of this Python's standard library."""
    entries = sorted(Path(sysconfig.get_path("stdlib")).iterdir())
    return [
        str(entry)
        for entry in entries
        if entry.suffix == ".py" or (entry.is_dir() and entry.name not in EXCLUDED_FOLDERS)
    ]


def ranks() -> int:
    """Return the number of ranks: one per GPU, but at most two; two if there is no GPU."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def with_machine_overrides(overrides: Sequence[str]) -> list[str]:
    """Return overrides for this machine, then the user's overrides, which take precedence."""
    precision = ["training.precision=bf16"] if torch.cuda.is_available() else []
    return [f"parallel.tensor={ranks()}", *precision, *overrides]


def torchrun() -> list[str]:
    """Return the Python arguments that start ``diffmegatron`` under torchrun."""
    # DNS may not resolve the name of this machine, which is torchrun's default address.
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks()}"]
    return ["-m", "torch.distributed.run", *options, *CLI]


def _run(seconds: dict[str, float], phase: str, *arguments: str) -> None:
    """Run a phase in a new Python process, and add its duration to ``seconds``."""
    started = announce(phase)
    # For several ranks, torchrun would set the same value, but print a warning about it.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, *arguments], env=environment, check=False)
    if result.returncode:
        raise UserError(
            f"phase {phase!r} failed with exit status {result.returncode}; its message is above"
        )
    seconds[phase] = round(time.perf_counter() - started, 1)


def announce(phase: str) -> float:
    """Print the name of a phase and return its start time."""
    print(f"\n== {phase}", flush=True)
    return time.perf_counter()


def write_report(names: Iterable[str], seconds: dict[str, float]) -> dict[str, Any]:
    """Measure exported runs, write ``report.json`` and ``report.png``, and return the report.

    ``seconds`` has the duration of each earlier phase in seconds.
    """
    started = announce("report")
    transformers_logging.disable_progress_bar()
    register()
    recorded = {name: read_run(RUNS / name) for name in names}
    models = {name: _describe(RUNS / name, recorded[name]) for name in recorded}
    titles = {name: str(model["title"]) for name, model in models.items()}
    runs = {titles[name]: run for name, run in recorded.items()}
    plot_runs(RUNS / "report.png", runs, has_throughput=False)
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
    (RUNS / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def closing_lines(models: Iterable[dict[str, Any]]) -> list[str]:
    """Return the lines that end the command: losses, exports and texts of the report's models."""
    lines = [
        f"{model['title']}: held-out loss {model['loss_first']:.2f} to {model['loss_last']:.2f} "
        f"nats per token in {model['tokens']:,} tokens; the export's logits differ by "
        f"{model['logit_difference']['relative']:.0e} (relative); a text of it begins with "
        f"{model['continuation']['text'][:60]!r}"
        for model in models
    ]
    return [*lines, "Models of this size show that the software works, not which kind is better."]


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
