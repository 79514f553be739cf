"""Measures this machine: GEMMs, attention, copies, collectives.

May import lowering, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, offload, execute.
"""
