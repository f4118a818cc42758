"""Recipes; `schema.py` has their sections, `load.py` reads them."""
