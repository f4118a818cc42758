"""Suites of evaluation, which `evaluate.py` runs on trained models."""
