"""Case function that runs the trainer with data, hooks, evaluation, profile, saves and resume."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from diffmegatron.config.schema import Recipe
from diffmegatron.evaluation.in_training import open_evaluators
from diffmegatron.training import trainer
from diffmegatron.training.saving import saver
from diffmegatron.training.trainer import train_stages
from tests.simulated_cuda.recorder import Recorder
from tests.simulated_cuda.recording import Case


def run_training(recipe: Recipe, _: Case, recorder: Recorder) -> dict[str, Any]:
    """Train or resume a recipe to its last step; each step is recorded as the phase "step".

    Returns:
        ``finished``: whether the run finished; ``steps``: numbers of the first and last step.
    """
    train_step, write_pieces, steps = trainer.train_step, saver.write_pieces, []

    def record_step(run: Any) -> None:
        with recorder.phase("step", is_step=True):
            train_step(run)
        steps.append(run.step)

    def write_zeros(path: Path, tensors: Mapping[str, Tensor], description: str) -> Any:
        # This function runs in the writer thread. Operations on fake tensors are impossible there,
        # because the fake mode is active only in the main thread.
        return write_pieces(path, {n: _zeros(x) for n, x in tensors.items()}, description)

    trainer.train_step, saver.write_pieces = record_step, write_zeros
    finished = train_stages([recipe], open_evaluators=open_evaluators)
    return {"finished": finished, "steps": [steps[0], steps[-1]] if steps else []}


def _zeros(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, FakeTensor):  # Random states are real tensors.
        return tensor
    name = str(tensor.dtype).removeprefix("torch.")
    return torch.from_numpy(np.zeros(tuple(tensor.shape), dtype=name))
