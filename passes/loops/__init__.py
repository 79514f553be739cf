"""Replacement of unrolled loops over experts by sorted rows and grouped GEMMs.

May import masks, rows, blocks, graph, ops, ir.
"""
