"""The homes of banks: host memory, shards on all ranks, and the parameters of models with expert parallelism.

Start with README.md, then `host_home.py` (the packer protocol), `peer_home.py` (shards on all ranks) and
`adopted_banks.py` (parameters of models that run with expert parallelism).

May import banks, ranks, transfer, kernels, system.
"""
