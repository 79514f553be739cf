"""Segments of a graph, and programs that run a segment expert by expert or in chunks of tokens.

Start at `partition.py`.

May import rows, blocks, cost, graph, ops, ir.
"""
