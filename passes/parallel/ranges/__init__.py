"""Which values places and sizes of a block may take, and which of them were tried.

May import parallel/match, graph, ops, ir.
"""
