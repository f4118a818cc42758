"""The computation of a step on this rank's microbatches, and the agreement of ranks on it."""
