"""Bytes reach a slot: links, sources, copiers, the ring, the order it learns, and records of it all.

May import kernels, system.
"""
