"""Lower segments to callables: operator by operator, by Inductor, expert by expert, or as Triton kernels.

Start with `lower_segments.py`. If a segment cannot be lowered as requested, the record says why.

May import kernels/grouped_gemm, kernels, system.
"""
