"""Kernels: the computation of experts, and the decoders of encoded banks. Functions of tensors.

`grouped_gemm` generates Triton kernels for GPUs, `cpu_gemm_library` chooses a library for CPUs, and `decoders` lists
the formats of banks.

May import system.
"""
