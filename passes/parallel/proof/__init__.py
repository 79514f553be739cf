"""A local form computes what its block computes: run both, small, with mock peers.

May import parallel/mock, parallel/ranges, parallel/rows, parallel/local_form, parallel/match, rows, graph, ops, ir.
"""
