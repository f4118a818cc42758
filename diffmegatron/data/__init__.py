"""Corpora: tokenizers, preparation, the files of tokens, and their order in a run."""
