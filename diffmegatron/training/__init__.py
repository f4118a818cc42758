"""The training loop of a recipe's stages, its hooks, and the safeguards of a run."""
