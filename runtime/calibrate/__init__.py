"""Calibration: measures the GEMMs, attention, copies and collectives of this machine, and makes a profile of it.

Start with `calibration.py`, which starts a process for each rank; `calibration_rank.py` runs the experiments in it.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, offload,
execute.
"""
