"""Process groups, devices and random states of the ranks, and Megatron-core without CUDA."""
