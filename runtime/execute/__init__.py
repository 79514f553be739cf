"""Compiled graphs run: the executor, the choice of a form, a step without work.

May import lowering, homes, banks, transfer, ranks, kernels, system.
"""
