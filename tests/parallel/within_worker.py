"""Ranks that train a recipe with suites within: ``RECIPE override ...``."""

import sys

from diffmegatron.config.load import load_recipe
from diffmegatron.evaluation.within import open_evaluators
from diffmegatron.training.stages import train_stages


def main() -> None:
    """Run the recipe of the command line."""
    recipe_file, *overrides = sys.argv[1:]
    assert train_stages([load_recipe(recipe_file, overrides)], None, open_evaluators)
