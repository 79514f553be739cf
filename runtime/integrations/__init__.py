"""Integrations with other libraries: expert parallelism of transformers, in `transformers_ep.py`.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, offload,
execute.
"""
