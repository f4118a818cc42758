"""One step over this rank's microbatches, and what the ranks agree on at its end."""
