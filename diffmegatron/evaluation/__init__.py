"""Suites on trained models; `suite.py` says what one is, `evaluate.py` runs them."""
