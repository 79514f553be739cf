"""Loops over experts, as models write them out, become sorted rows and grouped GEMMs.

May import masks, rows, blocks, graph, ops, ir.
"""
