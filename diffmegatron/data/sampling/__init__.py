"""Which tokens make the i-th sample of a run: documents, sequences and mixtures."""
