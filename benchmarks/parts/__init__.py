"""Parts that several benchmarks share, and kernels compiled without a GPU."""
