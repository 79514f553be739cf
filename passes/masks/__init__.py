"""Replacement of selections by masks of chosen experts by lookups of sorted pairs, whose number is known.

May import rows, blocks, graph, ops, ir.
"""
