"""Grouping of operations that treat each token independently, so that they can run in chunks of tokens.

May import rows, blocks, graph, ops, ir.
"""
