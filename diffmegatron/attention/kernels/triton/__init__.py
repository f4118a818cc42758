"""The backends "triton": this package's own Triton kernels."""
