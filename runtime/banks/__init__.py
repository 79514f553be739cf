"""Banks on the side of the model: packed experts, and the modules that read them.

May import transfer, kernels, system.
"""
