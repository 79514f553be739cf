"""Capacity slots of experts: computes only those that are read, and rewrites one-hot masks as lookups.

May import dense, loops, rows, blocks, graph, ops, ir.
"""
