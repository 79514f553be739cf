"""Grouped GEMMs with their row work as Triton kernels, written from expert programs. May import system."""
