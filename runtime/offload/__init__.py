"""A model's experts go to their home, from memory or from a checkpoint.

May import profiles, homes/registry, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
