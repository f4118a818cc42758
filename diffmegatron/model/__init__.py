"""The network of a recipe; `build.py` makes it, `language_model_loss.py` has its loss."""
