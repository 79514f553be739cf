"""Kernels for experts on GPUs (`grouped_gemm`), and decoders of encoded banks, on tensors. May import system."""
