"""One start of a small run in this process, timed by phase, for the benchmark ``startup``."""

import json
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

from diffmegatron.api import train
from diffmegatron.config.load import load_recipe
from diffmegatron.operations.recipes import CONFIGS
from diffmegatron.parallel.engine_imports import importing_engines
from diffmegatron.training.hook import Hook


class Phases(Hook):
    """Recorder of the CPU seconds of each phase.

    It is also a hook of the run, and thus records the phases inside :func:`train`.

    Attributes:
        seconds: CPU seconds by name of the phase, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        """End a phase: store under its name the CPU seconds since the end of the last phase."""
        self.seconds[phase] = time.process_time() - sum(self.seconds.values())

    def before_training(self, run: object) -> None:  # noqa: D102
        self.mark("network, optimizer, held-out loss")

    def after_step(self, run: object) -> None:  # noqa: D102
        self.mark("first step")


def start(mode: str, folder: str) -> None:
    """Start a run of one step, and print the seconds of its phases as a line of JSON.

    Args:
        mode: "train" to import with ``importing_engines``, which makes imports faster; "plain" to
            import without it.
        folder: folder with a prepared corpus.
    """
    phases = Phases()
    corpus, run_dir = f"{folder}/corpus", Path(folder, "run")
    shutil.rmtree(run_dir, ignore_errors=True)
    chosen = ["parallel.tensor=1", "training.steps=1", "training.eval_batches=1"]
    chosen += [f"run_dir={run_dir}", f"data.sources=[{{path: {corpus}}}]"]
    chosen += ["optimizer.schedule.warmup_steps=0"]
    recipe = load_recipe(CONFIGS / "quickstart.yaml", chosen)
    phases.mark("Python, recipe")
    with importing_engines() if mode == "train" else nullcontext():
        import torch  # noqa: F401

        phases.mark("torch")
        import megatron.core  # noqa: F401

        phases.mark("Megatron-core")
        import diffmegatron.training.trainer  # noqa: F401

        phases.mark("diffmegatron")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401

        phases.mark("DeepSpeed")
    train(recipe, [phases])
    print(json.dumps(phases.seconds))
