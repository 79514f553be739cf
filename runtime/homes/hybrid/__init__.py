"""Shards in host memory, staged on the compute side for all ranks.

May import homes, banks, ranks, transfer, kernels, system.
"""
