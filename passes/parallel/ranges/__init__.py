"""Possible values of a block's indices and sizes, and the values that mock runs had.

May import parallel/match, graph, ops, ir.
"""
