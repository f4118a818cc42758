"""The backend with this package's own Triton kernels."""
