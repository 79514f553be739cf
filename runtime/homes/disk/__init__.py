"""Home `disk`: experts stay in files. See `disk_home.py`. May import homes, banks, ranks, transfer, kernels, system."""
