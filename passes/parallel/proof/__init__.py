"""Proof that a local form computes the same as its block: small copies of both run with mock peers.

May import parallel/mock, parallel/ranges, parallel/rows, parallel/local_form, parallel/match, rows, graph, ops, ir.
"""
