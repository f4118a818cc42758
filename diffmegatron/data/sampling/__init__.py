"""Order in which a run reads its data: documents, sequences and the mixture of sources."""
