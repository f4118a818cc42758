"""Hooks of the training loop: the base class for users and the hooks of every run."""
