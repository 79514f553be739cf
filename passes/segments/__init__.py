"""Segments of a graph, and programs that run a segment expert by expert or some tokens at a time.

Start at `partition.py`.

May import rows, blocks, cost, graph, ir.
"""
