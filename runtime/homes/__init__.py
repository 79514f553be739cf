"""The homes of banks: host memory, shards on all ranks, and the parameters of models with expert parallelism.

Start with README.md, then `peer_home.py` (shards on all ranks), `adopted_banks.py` (parameters of models that run with
expert parallelism) and `options/packers.py` (the packer of each home).

May import banks, ranks, transfer, kernels, system.
"""
