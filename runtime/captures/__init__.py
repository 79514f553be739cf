"""Stored captures: what capture, passes, cutting and compiling gave for a model, on disk for the next process.

May import lowering, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, execute.
"""
