"""Home `hybrid`: shards in host memory, copied ahead into staging buffers on the compute device.

Start with `hybrid_home.py`, then `stager.py`, which fills the buffers, and `staged_pull.py`, which reads them.

May import homes, banks, ranks, transfer, kernels, system.
"""
