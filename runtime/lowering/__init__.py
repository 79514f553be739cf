"""A segment becomes a callable: by operators, by Inductor, expert by expert, as Triton kernels; or a reason why not.

May import kernels/grouped_gemm, kernels, system.
"""
