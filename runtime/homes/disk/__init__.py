"""Experts that stay in files, and are read into slots. May import homes, banks, ranks, transfer, kernels, system."""
