"""Where banks rest: in host memory, on peers, on devices, in parameters that a model has already.

May import banks, ranks, transfer, kernels, system.
"""
