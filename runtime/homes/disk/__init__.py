"""Home `disk`: experts stay in files and are read into slots. Start with `disk_home.py`.

May import homes, banks, ranks, transfer, kernels, system.
"""
