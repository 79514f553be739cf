"""Slots of experts: those that nobody reads are not computed, and one-hot masks that fill and read them are lookups.

May import dense, loops, rows, blocks, graph, ops, ir.
"""
