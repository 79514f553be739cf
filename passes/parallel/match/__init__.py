"""Blocks of expert parallelism, and collectives that belong to none, in a captured graph.

May import blocks, graph, ops, ir.
"""
