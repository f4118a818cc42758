"""The training loop: the deterministic setting is on in every step and off after the run."""

import torch

from diffmegatron.training.hook import Hook
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.run import Run
from diffmegatron.training.trainer import train


class Settings(Hook):
    """Hook that records at each step whether torch and Megatron's embedding are deterministic."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def after_step(self, run: Run) -> None:
        (stage,) = run.network.virtual_stages
        embedding = stage.embedding.word_embeddings
        self.seen.append(
            (torch.are_deterministic_algorithms_enabled(), embedding.deterministic_mode)
        )


def test_deterministic_algorithms_are_on_only_during_the_run(tiny_recipe, tmp_path):
    losses = {}
    for deterministic in (False, True):
        run_dir = tmp_path / str(deterministic)
        recipe = tiny_recipe(
            f"training.deterministic={deterministic}",
            f"run_dir={run_dir}",
            "training.steps=3",
            "training.log_interval=1",
            "training.eval_batches=0",
        )
        settings = Settings()
        assert train(recipe, hooks=[settings])
        assert settings.seen == [(deterministic, deterministic)] * 3
        assert not torch.are_deterministic_algorithms_enabled()
        losses[deterministic] = [
            entry["train/loss"] for entry in read_metrics(run_dir) if "train/loss" in entry
        ]
    assert losses[True] == losses[False] and len(losses[True]) == 3
