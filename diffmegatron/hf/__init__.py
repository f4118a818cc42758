"""Export and import of Hugging Face models; `weight_mapping.py` converts the weights."""
