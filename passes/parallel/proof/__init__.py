"""A local form computes what its block computes: run both, small, with mock peers.

May import ranges, rows, local_form, match, graph.
"""
