"""Measures this machine: GEMMs, attention, copies, collectives.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, offload,
execute.
"""
