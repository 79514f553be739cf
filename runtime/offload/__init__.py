"""A model's experts go to their home, from memory or from a checkpoint.

May import homes, banks, transfer, ranks, kernels, system.
"""
