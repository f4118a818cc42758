"""Own kernels, in Triton."""
