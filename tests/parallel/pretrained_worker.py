"""Ranks that train a recipe, started by :mod:`tests.ranks` with ``RECIPE override ...``."""

import sys

from diffmegatron.config.load import load_recipe
from diffmegatron.training.trainer import train


def main() -> None:
    """Train the recipe named on the command line."""
    recipe, *overrides = sys.argv[1:]
    train(load_recipe(recipe, overrides))
