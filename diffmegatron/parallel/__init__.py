"""Launch of the ranks, process groups, devices, random states, and Megatron-core without CUDA."""
