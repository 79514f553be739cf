"""The homes that can run: their options, and what packs the banks of a model for them.

May import homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
