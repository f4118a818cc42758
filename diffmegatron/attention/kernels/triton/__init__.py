"""The backend "triton": this package's own Triton kernels for attention."""
