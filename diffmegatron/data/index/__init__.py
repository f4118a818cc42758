"""Prepared corpora on disk: tokens, index and manifest."""
