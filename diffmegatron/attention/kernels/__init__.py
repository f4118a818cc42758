"""Attention functions with several backends, for differential and softmax attention."""
