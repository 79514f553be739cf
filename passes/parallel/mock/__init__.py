"""Runs of blocks on sample numbers: small copies of blocks, routing scenarios, and the interpreter.

May import parallel/ranges, parallel/rows, parallel/local_form, parallel/match, rows, graph, ops, ir.
"""
