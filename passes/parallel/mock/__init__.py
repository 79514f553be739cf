"""Blocks on numbers: small copies of them, how tokens are routed in each run, and one such run.

May import parallel/ranges, parallel/rows, parallel/local_form, parallel/match, rows, graph, ops, ir.
"""
