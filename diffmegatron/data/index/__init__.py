"""Prepared corpora on disk: tokens, index and manifest, and how they are opened."""
