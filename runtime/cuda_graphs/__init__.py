"""Segments as CUDA graphs: recorded when the shapes of a graph repeat, then replayed on the same memory.

May import system.
"""
