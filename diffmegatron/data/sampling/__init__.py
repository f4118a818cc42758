"""The sampling order of a run: documents, sequences and mixtures."""
