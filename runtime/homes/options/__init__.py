"""The options of each home, and the packer that each of them creates. Start with `home_options.py`.

May import homes, homes/hybrid, homes/disk, banks, ranks, transfer, kernels, system.
"""
