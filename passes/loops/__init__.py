"""Loops and masks over experts, as models write them out, become sorted rows and grouped GEMMs.

May import rows, blocks, graph, ir.
"""
