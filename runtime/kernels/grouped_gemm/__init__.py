"""Grouped GEMMs with row work on GPUs: generated Triton kernels, their tile sizes, and tuning.

Start reading at `kernel_source`, which writes a kernel, and `launch`, which runs it. May import kernels, system.
"""
