"""Local form of a parallel block: the rank runs its own tokens through all experts.

May import parallel/match, rows, graph, ops, ir.
"""
