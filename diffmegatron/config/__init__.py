"""Recipes: `schema.py` defines their sections, `load.py` reads them."""
