"""Experts of which each computes every token, or every slot: only what the result reads is computed.

May import loops, masks, rows, blocks, graph, ops, ir.
"""
