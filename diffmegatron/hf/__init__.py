"""Hugging Face models: the names of weights in `weight_mapping.py`, export and import."""
