"""Calibration: measures the GEMMs, attention, copies and collectives of this machine, and makes a profile of it.

`calibration.calibrate` starts a process for each rank; `calibration_rank` runs the experiments in it. Start reading at
`calibration`.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, offload,
execute.
"""
