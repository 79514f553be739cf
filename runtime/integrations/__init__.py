"""Other libraries meet moepass: expert parallelism of transformers.

May import lowering, cuda_graphs, homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system, offload,
execute.
"""
