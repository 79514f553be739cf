"""Compiled graphs run: the executor, the choice of a form, a step without work.

May import lowering, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
