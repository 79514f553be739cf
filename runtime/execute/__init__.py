"""Compiled graphs run: the executor, the choice of a form, a step without work.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
