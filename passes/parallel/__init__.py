"""Rewrite of expert parallelism into its proved local form, on which all ranks agree.

May import parallel/proof, parallel/mock, parallel/ranges, parallel/rows, parallel/local_form, parallel/match,
rows, blocks, graph, ops, ir.
"""
