"""The computation of a training step: microbatches, forward and backward passes, reductions."""
