"""Masks of the experts that a router chose: what they select is sorted by expert, so that its size is known.

May import rows, blocks, graph, ops, ir.
"""
