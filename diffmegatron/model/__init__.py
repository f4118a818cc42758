"""The network of a recipe: ``build.py`` builds it, ``language_model_loss.py`` computes its loss."""
