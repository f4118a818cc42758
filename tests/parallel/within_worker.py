"""Ranks that train a recipe with evaluation suites; the arguments are ``RECIPE override ...``."""

import json
import os
import sys
from pathlib import Path
from unittest import mock

from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.evaluation.in_training import open_evaluators
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.suite import Item, Record
from diffmegatron.evaluation.suites.needle import Retrieval
from diffmegatron.training.trainer import train_stages


def train(recipe: Recipe) -> None:
    """Train, and write the answers of the suite ``needle`` to ``answers.json`` in the run_dir."""
    answers, score = [], Retrieval.score

    def keep(suite: Retrieval, model: Model, item: Item) -> Record:
        record = score(suite, model, item)
        answers.append(record["answer"])
        return record

    with mock.patch.object(Retrieval, "score", keep):
        assert train_stages([recipe], None, open_evaluators)
    if os.environ.get("RANK", "0") == "0":
        (Path(recipe.run_dir) / "answers.json").write_text(json.dumps(answers))


def main() -> None:
    """Train the recipe named on the command line."""
    recipe_file, *overrides = sys.argv[1:]
    train(load_recipe(recipe_file, overrides))
