"""Run compiled graphs. Start with `executor.py`; `schedules.py` binds a graph to the ring and the banks that it reads.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
