"""Hugging Face models: weight names in `weight_mapping.py`, export and import."""
