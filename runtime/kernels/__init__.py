"""Kernels for experts on GPUs (`grouped_gemm`), decoders of encoded banks, and rows in FP8. May import system."""
