"""Functions for differential attention with several backends, independent of Megatron."""
