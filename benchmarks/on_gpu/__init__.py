"""The parts of `benchmarks.gpu`: kernels, streaming and memory on one GPU."""
