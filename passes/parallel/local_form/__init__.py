"""What a rank runs in place of a parallel block: its own tokens through all experts.

May import parallel/match, rows, graph, ops, ir.
"""
