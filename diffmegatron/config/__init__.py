"""Recipes, the YAML settings of a run: `schema.py` defines the keys, `load.py` reads the files."""
