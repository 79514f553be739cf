"""Kernels for experts on GPUs (`grouped_gemm`), and the decoders of encoded banks: functions of tensors.

May import system.
"""
